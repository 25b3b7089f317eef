# SPDX-License-Identifier: Apache-2.0
"""The search over splits, and what a config and nodes allow."""

import math

import pytest

from verl_digen.tools.simulate.splits import GRID_POINTS, Limits, Shape, best_of, placed_splits


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
