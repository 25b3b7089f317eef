# SPDX-License-Identifier: Apache-2.0
"""Host memory of a node, by hand."""

from dataclasses import replace

import pytest

from tests.plan.runs import GB, MEASURED, make_run
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


def test_a_node_holds_the_state_of_all_its_ranks_and_replicas():
    """Rank 0's checkpoint, and of each replica that sleeps encoder and VAE; the next update brings the transformer."""
    memory = plan_memory(make_run(param_offload=True), DEVICE)
    assert memory.host == {
        "trajectories and conditions": 32 * 10**7 + 4 * 10**6,
        "checkpoint of rank 0 while it loads": 32 * GB,
        "offloaded parameters": 8 * 4 * GB,
        "replicas that wait": 8 * 11 * GB,
    }
    assert memory.host_bytes == sum(memory.host.values())


@pytest.mark.parametrize(
    ("shares", "size", "copies"), [(True, 1, 27), (True, 2, 27), (False, 1, 8 * 27), (False, 2, 172)]
)
def test_sleeping_processes_of_a_node_share_one_copy_of_what_an_adapter_leaves_alone(shares, size, copies):
    """16 GB of base, 11 of encoder and VAE; without sharing 8 servers, or 4 servers and 4 peers that hold the base."""
    run = make_run(lora=True, shares_host_copies=shares, tensor_parallel=size)
    assert plan_memory(run, DEVICE).host["replicas that wait"] == copies * GB


def test_of_separate_pools_the_fuller_node_counts():
    split = plan_memory(make_run(is_split=True, frees_replica=False, param_offload=True), DEVICE).host
    assert split.keys() == {"trajectories and conditions", "staged weight updates"}  # 128 GB to the trainer's 64
