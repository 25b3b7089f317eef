# SPDX-License-Identifier: Apache-2.0
"""Recomputed blocks that a real engine chooses by itself, on a pretend device (`tests.pretend`) with little memory."""

from pathlib import Path
from typing import Any

import pytest

from tests.pretend.process import on_pretend
from tests.tiny_models import build_tiny_qwen_image

NUM_BLOCKS = 6
SIZE_PX = 256
"""Large enough for activations of a row to take more than the weights."""


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with more blocks."""
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel

    from verl_digen.models.tiny.parts import draw_weights

    path = build_tiny_qwen_image(tmp_path_factory.mktemp("deep") / "checkpoint")
    config: Any = QwenImageTransformer2DModel.load_config(path / "transformer")
    network: Any = QwenImageTransformer2DModel.from_config({**config, "num_layers": NUM_BLOCKS})
    draw_weights(network)
    network.save_pretrained(path / "transformer")
    return path


def _under_a_limit(path: str, folder: str) -> dict[str, Any]:
    """Peaks and gradients of an engine with no, all, and automatically recomputed blocks, the last under a limit."""
    from dataclasses import replace

    import torch.distributed as dist

    from tests.engine import harness
    from tests.pretend.memory import memory
    from verl_digen.engine.memory import state_to_come
    from verl_digen.engine.recompute import ALL
    from verl_digen.platforms.device_memory import MARGIN
    from verl_digen.types import Geometry

    sampling = replace(harness.SAMPLING, geometry=Geometry(SIZE_PX, SIZE_PX))
    batch = harness.make_batch(path, sampling=sampling, windows=((0, 1),), group_size=2)
    dist.init_process_group("cpu:gloo,pretend:gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    digen = {
        "sampling": {"height_px": SIZE_PX, "width_px": SIZE_PX},
        "tsp": {"samples_per_tile": 1, "steps_per_tile": 1},
    }
    engine = harness.make_engine(path, model={"recompute_blocks": "auto"}, digen=digen)
    kinds = {type(module).__name__ for module in engine.module.modules()}
    assert "FusedNorm" in kinds and "RMSNorm" not in kinds, "as on every accelerator"
    blocks = engine.planner.recomputation

    def trained(fixed: int | None) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """(peak, gradient on the CPU, metrics) with this setting; no optimizer step."""
        blocks.fixed = fixed
        memory.peak = memory.recount()
        found, output = harness.gradients(engine, batch)
        return memory.peak, {name: value.cpu() for name, value in found.items()}, output["metrics"]

    none, expected, _ = trained(0)
    every, _, _ = trained(ALL)
    room = (none + every) // 2  # of a tile, beside the moments that the first step makes
    limit = int((room + state_to_come(engine.optimizer)) / (1 - MARGIN)) + 1
    with memory.limited(limit):
        peak, found, metrics = trained(None)
        harness.assert_close(found, expected, 1e-6)
        steps = harness.train(engine, batch, num_updates=2)
        memory.peak = memory.recount()
        with pytest.raises(RuntimeError, match=r"digen.tsp must give tiles that fit.*recompute_blocks=all"):
            trained(0)
    return {
        "limit": limit,
        "peaks": (every, peak, none),
        "shares": [metrics["recomputed_share"], *(output["metrics"]["recomputed_share"] for output in steps)],
    }


@pytest.mark.long
def test_as_many_blocks_are_recomputed_as_memory_asks_for_and_the_gradient_stays(deep: Path, tmp_path: Path) -> None:
    """A tile fits with half of what its blocks keep; without recomputation it does not, once the moments are there."""
    found = on_pretend(_under_a_limit, str(deep), str(tmp_path))
    least, peak, most = found["peaks"]
    assert least < peak < most
    counts = {round(share * NUM_BLOCKS, 6) for share in found["shares"]}
    assert len(counts) == 1 and counts <= set(range(2, NUM_BLOCKS - 1)), (counts, found)
