# SPDX-License-Identifier: Apache-2.0
"""Planned training tiles against PyTorch's memory tracker, in networks of published width and few blocks.

`python -m tests.plan.tracker` makes the whole table, of docs/memory.md.
"""

import pytest

from tests.plan.fake_engine import plan_run, shallow
from tests.plan.tracker import CASES, DEVICE_BYTES, NO_TENSORS, depth_of, tile_bytes, track, words_of
from verl_digen.tools.plan.memory import plan_memory

pytestmark = pytest.mark.long

WITHIN = 0.05
RECIPES = {case.recipe: case for case in CASES}


@pytest.mark.parametrize(
    ("recipe", "num_ranks"), [("digen_qwen_image", 8), pytest.param("digen_z_image", 64, marks=pytest.mark.grid)]
)
def test_a_tile_takes_what_is_planned(recipe, num_ranks):
    """LoRA with guidance, and LoRA with one row per sample."""
    case = RECIPES[recipe]
    with shallow(case.repository, depth_of(case, case.few)) as folder:
        memory = plan_memory(plan_run(words_of(case), num_ranks, str(folder)), DEVICE_BYTES)
    tracked = track(case, depth_of(case, case.few), num_ranks, memory, memory.num_recomputed)
    assert NO_TENSORS[1] in memory.training.items  # what is taken out of the comparison is there
    assert tile_bytes(memory) == pytest.approx(tracked.total, rel=WITHIN)
