# SPDX-License-Identifier: Apache-2.0
"""Images of video pipelines in a network's dtype; in fp32, `test_request_mode.py` compares whole samples."""

from __future__ import annotations

import torch

from tests.models.cases import draw_image
from tests.tiny_models import build_tiny
from verl_digen.models import load_model
from verl_digen.sampling.requests import inputs_of
from verl_digen.types import Geometry


def test_clip_encodes_in_fp32_where_the_network_runs_in_bf16(one_worker, tmp_path):
    """Tokens equal those of a `diffusers` replica bit for bit; vLLM-Omni itself loads CLIP in bf16."""
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    from verl_digen.rollout.vllm_omni.pipeline import recording_class

    path = build_tiny("wan2.1_i2v", tmp_path / "checkpoint")
    config = OmniDiffusionConfig.from_kwargs(model=str(path), dtype="bfloat16")
    config.enrich_config()
    pipeline = recording_class("WanImageToVideoPipeline")(od_config=config)
    inputs = inputs_of("a red circle", (draw_image(tmp_path / "0.png", (90, 40), 0),), Geometry(64, 64, 5), 64)
    (expected,) = load_model(path).load_encoder(torch.bfloat16, torch.device("cpu"))([inputs])
    found = pipeline.encode_condition(inputs)
    assert found["image"].dtype == torch.bfloat16 and torch.equal(found["image"], expected["image"])
    assert torch.equal(found["embeds"], expected["embeds"])
