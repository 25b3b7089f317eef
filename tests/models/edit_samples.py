# SPDX-License-Identifier: Apache-2.0
"""Requests for an edit, and samples of them, for the tests of the FLUX models that read images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.cases import CPU
from verl_digen.algorithms.noise import INITIAL_LATENTS, noise
from verl_digen.algorithms.window import Window
from verl_digen.config import DigenConfig
from verl_digen.config.sampling import SamplingConfig
from verl_digen.inputs import SourceImage
from verl_digen.models.base import DiffusionModel, PromptEncoder
from verl_digen.sampling.requests import sample_request
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import Geometry, PromptRow, SampleRequest

TEXT, SEED, NUM_STEPS = "make it red", 7, 3
ODE = Window(sde_steps=(), train_steps=())


def request_of(model: DiffusionModel, images: tuple[SourceImage, ...], **sampling: Any) -> SampleRequest:
    """A request of `TEXT` and images, with settings of `digen.sampling`."""
    settings = SamplingConfig(val_num_steps=NUM_STEPS, image_sizes=model.spec.image_sizes, **sampling)
    row = PromptRow(TEXT, "", None, uid="p", images=tuple(image.reference for image in images))
    return replace(sample_request(DigenConfig(sampling=settings), row, 0, step=0, validate=True), window=ODE)


def sample(model: DiffusionModel, network: nn.Module, encode: PromptEncoder, request: SampleRequest) -> Tensor:
    """Final latents of our sampler."""
    sampler = Sampler(model, network, run_seed=SEED, device=CPU, latents_dtype=torch.float32)
    negative = encode([request.negative_inputs]) if request.sampling.true_cfg_scale > 1 else None
    return sampler.sample([request], encode([request.inputs]), negative, version=0)[1]


def start_of(model: DiffusionModel, geometry: Geometry) -> Tensor:
    """The sampler's initial latents, as the pipeline takes them."""
    drawn = noise(SEED, "p", 0, INITIAL_LATENTS, model.latent_shape(geometry))[None]
    return model.pipeline_start(drawn, geometry)
