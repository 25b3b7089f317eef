# SPDX-License-Identifier: Apache-2.0
"""Bytes and rows of a planned sample against a real one's record."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from verl_digen.algorithms.forward import ForwardConfig
from verl_digen.algorithms.window import WindowConfig
from verl_digen.config import DigenConfig, SamplingConfig
from verl_digen.inputs import PromptInputs
from verl_digen.models import load_model
from verl_digen.plan.run import record_bytes
from verl_digen.sampling.requests import num_points, sample_request
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import PromptRow

SAMPLING = SamplingConfig(height_px=32, width_px=32, num_steps=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "digen",
    [
        DigenConfig(sampling=SAMPLING),
        DigenConfig(sampling=SAMPLING, window=WindowConfig(kind="fraction", fraction=0.4)),
        DigenConfig(loss={"name": "diffusion_nft"}, sampling=SAMPLING, forward=ForwardConfig(num_points=4)),
    ],
    ids=["all", "fraction", "forward"],
)
def test_a_record_is_as_large_as_a_real_one(tiny_qwen_image, digen, dtype):
    model = load_model(tiny_qwen_image)
    network = model.load_transformer(torch.float32)
    conditions = model.load_encoder(torch.float32, torch.device("cpu"))([PromptInputs("a cat")])
    for uid in ("p0", "p1", "p2"):
        asked = sample_request(digen, PromptRow("a cat", "test", None, uid=uid), 0, step=0, validate=False)
        asked = replace(asked, sampling=replace(asked.sampling, true_cfg_scale=1.0))
        sampler = Sampler(model, network, run_seed=0, device="cpu", latents_dtype=dtype)
        (made,), _ = sampler.sample([asked], conditions, None, version=0)
        latent_bytes = prod(model.latent_shape(asked.sampling.geometry)) * dtype.itemsize
        assert record_bytes(asked, latent_bytes) == sum(column.nbytes for column in made.record.columns().values())
        assert num_points(digen) == len(made.record.sigmas)
