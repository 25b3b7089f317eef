# SPDX-License-Identifier: Apache-2.0
"""Plans against the real memory of a network of a billion parameters: Wan2.1-1.3B with 20 of its 30 layers.

Full weights in bf16, which take 8 GB with gradients and AdamW's two moments; an adapter over fp32 weights, 4 GB.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from tests.engine.harness import gradients, make_batch, make_engine, process_group, train
from tests.grid import in_grid
from tests.plan.test_reality import WITHIN, adapter_words, num_bytes, optimizer_bytes, parameter_bytes, plan
from tests.tiny_models import build_tiny
from verl_digen.models.tiny.text import TEXT_WIDTH
from verl_digen.models.tiny.wan import LATENT_CHANNELS
from verl_digen.plan.memory import plan_memory

pytestmark = pytest.mark.long

LORA = {"lora_rank": 32, "lora_alpha": 64, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"]}
CASES = {"full, bf16": ({}, "bf16"), "lora, fp32": (LORA, "fp32")}
"""Name -> (the engine's model options, its weights' dtype)."""


@pytest.fixture(scope="module")
def wan_1b(tmp_path_factory):
    """A checkpoint of 2 GB, deleted afterwards."""
    path = build_tiny("wan2.1", tmp_path_factory.mktemp("wan_1b") / "checkpoint")
    torch.set_default_dtype(torch.bfloat16)
    try:
        transformer = WanTransformer3DModel(
            num_attention_heads=12,
            attention_head_dim=128,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_WIDTH,
            freq_dim=256,
            ffn_dim=8960,
            num_layers=20,
            qk_norm="rms_norm_across_heads",
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert 0.9e9 < sum(parameter.numel() for parameter in transformer.parameters()) < 1.1e9
    transformer.save_pretrained(path / "transformer")
    del transformer
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("case", [*in_grid(["full, bf16"]), "lora, fp32"])
def test_a_step_takes_what_was_planned(wan_1b, case, tmp_path):
    model, dtype = CASES[case]
    planned = plan(wan_1b, f"actor_rollout_ref.actor.fsdp_config.model_dtype={dtype}", *adapter_words(model))
    items = plan_memory(planned, 64 * 10**9).training.items
    batch = make_batch(wan_1b, group_size=1, windows=((0,), (1,)))
    with process_group(0, 1, str(tmp_path / "store")):
        engine = make_engine(wan_1b, model=dict(model), fsdp={"model_dtype": dtype})
        grads, _ = gradients(engine, batch)
        assert items["gradients"] == pytest.approx(num_bytes(grads.values()), rel=WITHIN)
        del grads
        train(engine, batch)
        assert items["parameters"] == pytest.approx(parameter_bytes(engine), rel=WITHIN)
        assert items["optimizer"] == pytest.approx(optimizer_bytes(engine), rel=WITHIN)
        engine.wire_dtype = planned.settings.dtypes.rollout  # as the worker tells the engine
        exported = sum(value.nbytes for _, value in engine.get_per_tensor_param()[0])
    sent = plan_memory(planned, 64 * 10**9).step["weights to all replicas"]
    assert sent == pytest.approx(exported * planned.settings.num_replicas, rel=WITHIN)
