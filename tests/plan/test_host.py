# SPDX-License-Identifier: Apache-2.0
"""Host memory of a node, by hand."""

from dataclasses import replace

import pytest

from tests.plan.runs import GB, MEASURED, SETTINGS, make_run
from verl_digen.plan.host import page_locked_bytes
from verl_digen.plan.memory import plan_memory
from verl_digen.plan.networks import Tensors

DEVICE = 80 * GB
MIB = 1 << 20


@pytest.mark.parametrize(("asked", "taken"), [(0, 0), (1, 1), (3, 4), (4, 4), (5 * MIB, 8 * MIB), (8 * MIB, 8 * MIB)])
def test_page_locked_memory_comes_in_powers_of_two(asked, taken):
    assert page_locked_bytes(asked) == taken


def test_offloaded_shards_are_rounded_one_by_one():
    """Shards of each of 8 ranks: 5 MiB of ten frozen tensors, 1.5 MiB of two trained ones."""
    tensors = (Tensors(40 * MIB, False, 10), Tensors(12 * MIB, True, 2))
    run = make_run(param_offload=True, optimizer_offload=True, is_accelerated=True)
    host = plan_memory(replace(run, measured=replace(MEASURED, tensors=tensors)), DEVICE).host
    assert host["offloaded parameters"] == 8 * (10 * 8 + 2 * 2) * MIB
    assert host["offloaded optimizer"] == 8 * 2 * (2 * 2) * MIB


ONE = {"num_trainer_devices": 1, "num_generator_devices": 1, "trainer_devices_per_node": 1}
ONE |= {"generator_devices_per_node": 1, "num_shards": 1, "param_offload": True, "is_accelerated": True}
SAME = replace(SETTINGS.dtypes, model=SETTINGS.dtypes.rollout)


@pytest.mark.parametrize(
    ("changes", "offloaded", "base", "waiting"),
    [
        ({"dtypes": SAME}, 4, 3000, 11),
        ({"dtypes": SAME, "trainer_devices_per_node": 8}, 8 * 4, 3000, 11),
        ({"dtypes": SAME, "merges_lora": True}, 4, 3000, 11),
        ({}, 4, 3000, 27),  # the replica has the base in another dtype
        ({"dtypes": SAME, "num_shards": 8}, 512.5, None, 27),
        ({"dtypes": SAME, "shares_host_copies": False}, 4096 + 4, None, 27),
    ],
)
def test_a_frozen_base_that_a_rank_holds_whole_is_there_once_and_is_not_rounded(changes, offloaded, base, waiting):
    """3000 MiB of base, of which the replica has 16 GB by hand, and 3 MiB of adapter."""
    run = make_run(lora=True, **(ONE | {"shares_host_copies": True} | changes))
    tensors = (Tensors(3000 * MIB, False, 1), Tensors(3 * MIB, True, 1))
    host = plan_memory(replace(run, measured=replace(run.measured, tensors=tensors)), DEVICE).host
    assert host["offloaded parameters"] == offloaded * MIB
    assert host.get("frozen base, offloaded") == (None if base is None else base * MIB)
    assert host["replicas that wait"] == waiting * GB


def test_a_node_holds_the_state_of_all_its_ranks_and_replicas():
    """Rank 0's checkpoint, and of each replica that sleeps encoder and VAE; the next update brings the transformer."""
    memory = plan_memory(make_run(param_offload=True), DEVICE)
    assert memory.host == {
        "trajectories and conditions": 32 * 10**7 + 4 * 10**6,
        "checkpoint of rank 0 while it loads": 32 * GB,
        "offloaded parameters": 8 * 4 * GB,
        "replicas that wait": 8 * 11 * GB,
        "prompt cache": 0,
    }
    assert memory.host_bytes == sum(memory.host.values())


@pytest.mark.parametrize(("shares", "copies"), [(True, 27), (False, 8 * 27)])
def test_sleeping_processes_of_a_node_share_one_copy_of_what_an_adapter_leaves_alone(shares, copies):
    """16 GB of base, 11 of encoder and VAE."""
    run = make_run(lora=True, shares_host_copies=shares)
    assert plan_memory(run, DEVICE).host["replicas that wait"] == copies * GB


def test_of_separate_pools_the_fuller_node_counts():
    split = plan_memory(make_run(is_split=True, frees_replica=False, param_offload=True), DEVICE).host
    assert split.keys() == {
        "trajectories and conditions",
        "staged weight updates",
        "prompt cache",
    }  # 128 GB to the trainer's 64
