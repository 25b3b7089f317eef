# SPDX-License-Identifier: Apache-2.0
"""Requests for an edit, and samples of them, for the tests of models that read images."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.cases import CPU
from verl_digen.algorithms.noise import INITIAL_LATENTS, sample_seed, step_noise
from verl_digen.algorithms.window import Window
from verl_digen.config import DigenConfig
from verl_digen.config.sampling import SamplingConfig
from verl_digen.inputs.images import SourceImage
from verl_digen.models.base import DiffusionModel, PromptEncoder
from verl_digen.sampling.requests import sample_request
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import Condition, Geometry, PromptRow, SampleRequest

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
    drawn = step_noise(sample_seed(SEED, "p", 0), INITIAL_LATENTS, model.latent_shape(geometry))[None]
    return model.pipeline_start(drawn, geometry)


def assert_conditions_of_their_own(
    model: DiffusionModel, network: nn.Module, encode: PromptEncoder, asked: Sequence[SampleRequest], num_tokens: int
) -> None:
    """Assert that two images of one size and a text alone have conditions and keys of their own, which are read.

    Args:
        asked: one text with the one image, with the other, and alone.
        num_tokens: tokens of an image.
    """
    first, second, without = asked
    assert first.sampling == second.sampling != without.sampling, "one bucket: they may share a forward"
    assert len({one.condition_key for one in asked}) == 3
    one, other, bare = encode([request.inputs for request in asked])
    assert one["embeds"].equal(other["embeds"]) and not one["source"].equal(other["source"])
    assert one.keys() - bare.keys() == {"source"}
    x, sigma = torch.randn(1, *model.latent_shape(first.sampling.geometry)), torch.tensor([0.5])

    def velocity(condition: Condition, request: SampleRequest = first) -> Tensor:
        return model.velocity(network, x, sigma, [condition], None, 1.0, request.sampling.geometry)

    assert (velocity(one) - velocity(other)).abs().mean() > 1e-3, "the network reads the image"
    assert (velocity(one) - velocity(bare, without)).abs().mean() > 1e-3
    with pytest.raises(RuntimeError, match=rf"must have 0 tokens of images for Geometry\(.*, got {num_tokens}; encode"):
        velocity(one, without)
