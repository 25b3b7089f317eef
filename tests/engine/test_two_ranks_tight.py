# SPDX-License-Identifier: Apache-2.0
"""Automatic tiles of two ranks, one of which has less memory: both choose the smaller tile."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.engine.harness import assert_close, gathered, gradients, make_batch, make_engine, on_two_ranks
from tests.engine.test_tight_device import TightDevice

pytestmark = [pytest.mark.slow, pytest.mark.long]


def less_memory(path: Path, folder: Path) -> Any:
    """The ranks measure a device of so many units of the weights, where a row takes half of one."""
    engine = make_engine(path)
    device = TightDevice(engine, 20 if dist.get_rank() == 0 else 6, lambda count, length: 0.5 * count)
    with pytest.MonkeyPatch.context() as patch:
        device.put_in(patch)
        found, _ = gradients(engine, make_batch(path))
        return found, gathered(device.sizes())


def test_both_ranks_take_the_tile_of_the_one_with_less_memory(one_rank: None, tiny_qwen_image: Path, tmp_path: Path):
    found, (own, tights) = on_two_ranks([less_memory], tiny_qwen_image, tmp_path)["less_memory"]
    assert own == tights and max(own) < 9, "9 rows of a rank would fit on the other"
    one_row = {"tsp": {"samples_per_tile": 1, "steps_per_tile": 1}}
    assert_close(found, gradients(make_engine(tiny_qwen_image, digen=one_row), make_batch(tiny_qwen_image))[0], 1e-5)
