# SPDX-License-Identifier: Apache-2.0
"""Pools on nodes and the search over splits: shapes that fit, the overrides for them, what config and nodes allow."""

import math
import random

import pytest

from verl_digen.hardware.devices import Pool
from verl_digen.tools.simulate.splits import (
    GRID_POINTS,
    Limits,
    Shape,
    arrange,
    best_of,
    nodes_of,
    placed_splits,
    pool_overrides,
    type_overrides,
)


def test_nodes_are_full_but_the_last():
    assert nodes_of(20) == [8, 8, 4] and nodes_of(16) == [8, 8] and nodes_of(3, 4) == [3]


@pytest.mark.parametrize(
    ("trainer", "generator", "shapes"),
    [
        (4, 28, (Shape(1, 4), Shape(7, 4))),  # 4 x 7 would leave no room for the 4
        (20, 12, (Shape(4, 5), Shape(4, 3))),  # on four nodes together
    ],
)
def test_a_pool_takes_as_few_nodes_as_there_is_room_for(trainer, generator, shapes):
    assert arrange({"H800": [8] * 4}, Pool(trainer, "H800"), Pool(generator, "H800")) == shapes


def test_types_have_nodes_of_their_own():
    nodes = {"H800": [8, 8, 4], "A100": [8] * 3}
    assert arrange(nodes, Pool(20, "H800"), Pool(24, "A100")) == (Shape(5, 4), Shape(3, 8))
    assert arrange(nodes, Pool(20, "H800"), Pool(1, "H800")) is None


def test_no_node_holds_more_than_it_has():
    rng = random.Random(0)
    placed = 0
    for _ in range(200):
        nodes = [rng.randint(1, 8) for _ in range(rng.randint(1, 5))]
        trainer = rng.randint(1, sum(nodes))
        generator = rng.randint(1, sum(nodes))
        found = arrange({"H800": nodes}, Pool(trainer, "H800"), Pool(generator, "H800"))
        if found is None:
            continue
        placed += 1
        assert [shape.num_devices for shape in found] == [trainer, generator]
        sizes = [shape.per_node for shape in found for _ in range(shape.nnodes)]
        assert can_be_packed(sorted(sizes, reverse=True), nodes)
    assert placed > 50


def can_be_packed(sizes, free) -> bool:
    """Exhaustive search, with equal free space tried once."""
    if not sizes:
        return True
    for left in set(free):
        if left >= sizes[0]:
            rest = list(free)
            rest[rest.index(left)] -= sizes[0]
            if can_be_packed(sizes[1:], rest):
                return True
    return False


def test_overrides_are_the_keys_of_both_pools():
    assert pool_overrides(Shape(5, 4), Shape(3, 8)) == [
        "trainer.nnodes=5",
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.nnodes=3",
        "actor_rollout_ref.rollout.n_gpus_per_node=8",
    ]
    assert type_overrides(Pool(5, "H800"), Pool(3, "H800")) == []
    assert type_overrides(Pool(5, "H800"), Pool(3, "A100")) == [
        "digen.placement.trainer_accelerator=H800",
        "digen.placement.generator_accelerator=A100",
    ]


def sizes(families) -> list[list[str]]:
    return [[str(placed.split) for placed in family] for family in families]


def test_any_number_of_devices_may_train():
    assert sizes(placed_splits({"H800": [8, 8]}, Limits())) == [
        [f"{number}xH800 + {16 - number}xH800" for number in range(1, 16)]
    ]


@pytest.mark.parametrize(
    ("limits", "trainers"),
    [
        ({"fsdp_size": 4}, [1, 2, 3, 4, 8, 12]),  # up to 4 ranks are one group of shards, whatever their number
        ({"sequence_parallel": 2}, [2, 4, 6, 8, 10, 12, 14]),
    ],
)
def test_shards_and_rows_are_shared_by_whole_groups_of_ranks(limits, trainers):
    (family,) = placed_splits({"H800": [8, 8]}, Limits(**limits))
    assert [placed.split.trainer.num_devices for placed in family] == trainers


def test_replicas_of_several_devices_leave_none_over():
    (family,) = placed_splits({"H800": [8, 8]}, Limits(replica_devices=4))
    assert [placed.split.generator.num_devices for placed in family] == [12] * 4 + [8] * 4 + [4] * 4


def test_of_two_types_either_trains_and_either_is_left_out():
    families = placed_splits({"H800": [4], "A100": [2]}, Limits())
    assert sizes(families) == [
        ["1xH800 + 3xH800", "2xH800 + 2xH800", "3xH800 + 1xH800"],
        ["1xH800 + 2xA100", "2xH800 + 2xA100", "3xH800 + 2xA100", "4xH800 + 2xA100"],
        ["1xA100 + 4xH800", "2xA100 + 4xH800"],
        ["1xA100 + 1xA100"],
    ]
    assert families[1][3].trainer == Shape(1, 4)


def test_the_best_of_several_families_is_found_and_what_cannot_run_is_not():
    families = [[5, 3, 4], [9, 2, 7], [math.inf]]
    assert best_of(families, float) == (2, 2.0)
    assert best_of([[math.inf, math.inf]], float) is None and best_of([], float) is None


def test_a_long_family_is_narrowed_down_with_few_trials():
    tried = []

    def step_s(item: int) -> float:
        tried.append(item)
        return abs(item - 637)

    assert best_of([range(1024)], step_s) == (637, 0)
    assert len(tried) == len(set(tried)) <= 4 * GRID_POINTS
