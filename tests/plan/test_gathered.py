# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from tests.plan.runs import ACTIVATIONS, BLOCK, GB, make_run
from verl_digen.tools.plan.memory import Memory, may_be_whole, plan_memory
from verl_digen.tools.plan.remedies import find_remedies
from verl_digen.tools.plan.run import Job

DEVICE = 80 * GB
WHOLE = 16_200_000_000
"""8 B frozen parameters and 0.1 B of an adapter, in bf16."""


def make(whole_base: bool | str, *, saved: int = 3 * GB, **settings) -> Job:
    """An adapter on a network with 8 B parameters, and the adapter's share in its blocks."""
    run = make_run(lora=True, whole_base=whole_base, is_accelerated=True, **settings)
    blocks = (replace(BLOCK, num_trained=GB // 320, saved=saved, peaks=((saved, 0),)),) * 32
    return replace(run, measured=replace(run.measured, training=replace(ACTIVATIONS, blocks=blocks)))


def total(memory: Memory) -> int:
    return sum(memory.training.items.values())


def test_a_whole_base_takes_its_size_beside_its_shard():
    sharded, whole = plan_memory(make(False), DEVICE), plan_memory(make(True), DEVICE)
    assert whole.is_base_whole and not sharded.is_base_whole
    assert whole.training.items["parameters"] == sharded.training.items["parameters"]
    assert whole.training.items["gathered parameters"] == WHOLE
    assert sharded.training.items["gathered parameters"] == 2 * (GB // 4) * 2  # two blocks in bf16
    assert "gathered parameters" not in whole.generating.items, "it is freed before a replica generates"


@pytest.mark.parametrize(
    ("device", "recompute", "saved", "is_whole"),
    [
        (DEVICE, "all", 3 * GB, True),
        (36 * GB, "all", 3 * GB, True),
        (24 * GB, "all", 3 * GB, False),  # no row fits beside it
        (44 * GB, "auto", GB // 2, True),  # 2 of 32 blocks more are recomputed
        (34 * GB, "auto", GB // 2, False),  # more than half of the blocks would be
        (None, "all", 3 * GB, False),  # memory is not known
    ],
)
def test_auto_keeps_the_base_whole_where_tiles_are_cheaper(device, recompute, saved, is_whole):
    memory = plan_memory(make("auto", recompute=recompute, saved=saved), device)
    assert memory.is_base_whole == is_whole
    if device is not None:
        assert memory.training.total <= 0.9 * device


def test_a_base_on_one_device_is_read_in_place():
    dtypes = replace(make(False).settings.dtypes, model=torch.bfloat16)
    one = {"num_trainer_devices": 1, "num_generator_devices": 1, "dtypes": dtypes}
    copied, in_place = (plan_memory(make(whole, **one), DEVICE) for whole in (False, "auto"))
    assert in_place.is_base_whole
    assert in_place.training.items["gathered parameters"] == 2 * (GB // 320) * 2  # two blocks in bf16
    assert copied.training.items["gathered parameters"] == 2 * (GB // 4) * 2


def test_auto_is_for_a_base_that_is_frozen_and_sharded():
    assert may_be_whole(make("auto"))
    assert not may_be_whole(make_run(whole_base="auto"))
    assert not may_be_whole(make("auto", fsdp_size=1))


def test_a_run_that_does_not_fit_gives_the_whole_base_up():
    given = make(True, is_split=True)
    found = find_remedies(given, 24 * GB, lambda *words: make(False))
    assert found[0].override == "actor_rollout_ref.model.whole_base=false"
    assert found[0].training_bytes <= 0.9 * 24 * GB < plan_memory(given, 24 * GB).training.total
