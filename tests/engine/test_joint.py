# SPDX-License-Identifier: Apache-2.0
"""Joint columns: the same wherever a fragment's rows lie; a group's rows together where the objective needs them."""

import random

import pytest
import torch

from tests.engine.harness import described
from verl_digen.algorithms.objectives import ClampedConfig, Joint, JointRows, LossConfig, LossOutput, register_objective
from verl_digen.config import AdvantageConfig
from verl_digen.engine.fragment import fragment_rows
from verl_digen.engine.ledger import AdvantageLedger
from verl_digen.engine.rows import AllRows, Samples, TileWork
from verl_digen.schedulers.deal import Row, deal_rows
from verl_digen.schedulers.tiles import Grid, plan_tiles

NUM_POINTS = (3, 1, 2, 2)
SAMPLES = [described(str(n), "ab"[n // 2], 0.0, count) for n, count in enumerate(NUM_POINTS)]
ROWS = fragment_rows(SAMPLES)


def value_of(row: Row) -> float:
    return 10.0 * row.sample + row.point


def by_group(rows: JointRows) -> torch.Tensor:
    """Sum of a group's scalars, and in its decimals what else a row knows."""
    sums = torch.zeros(2).index_add(0, rows.groups, rows.scalars)
    return sums[rows.groups] + rows.samples / 10 + rows.points / 100 + rows.advantages / 1000


def on_ranks(num_ranks: int, shape: Grid, all_rows: AllRows) -> list[tuple[Row, float]]:
    """(row, its column) of every tile of every rank, with the sum over the ranks made here."""
    dealt = deal_rows(ROWS, num_ranks)
    nothing = Samples([], {}, [], torch.zeros(0))
    works = [TileWork(nothing, {}, plan_tiles(dealt, rank, shape), all_rows, {}) for rank in range(num_ranks)]
    scalars = [[torch.tensor([value_of(row) for row in tile.rows]) for tile in work.tiles] for work in works]
    parts: list[torch.Tensor] = []

    def collect(part: torch.Tensor) -> torch.Tensor:
        parts.append(part.clone())
        return part

    for work, own in zip(works, scalars, strict=True):
        work.joint_columns(own, by_group, collect)
    total = torch.stack(parts).sum(0)
    found: list[tuple[Row, float]] = []
    for work, own in zip(works, scalars, strict=True):
        columns = work.joint_columns(own, by_group, lambda part: total)
        for tile, column in zip(work.tiles, columns, strict=True):
            found += zip(tile.rows, column.tolist(), strict=True)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_column_is_the_same_on_any_ranks_and_tiles(num_ranks: int):
    advantages = torch.tensor([1.0, 2.0, 3.0, 4.0])
    all_rows = AllRows(ROWS, [sample.facts.uid for sample in SAMPLES], advantages)
    sums = {group: sum(value_of(row) for row in ROWS if row.sample // 2 == group) for group in (0, 1)}
    rng = random.Random(num_ranks)
    for _ in range(20):
        for row, value in on_ranks(num_ranks, Grid(rng.randint(1, 3), rng.randint(1, 3)), all_rows):
            decimals = row.sample / 10 + row.point / 100 + float(advantages[row.sample]) / 1000
            assert value == pytest.approx(sums[row.sample // 2] + decimals, rel=1e-6)


def test_a_group_whose_sample_is_held_is_held_where_its_rows_are_needed_together():
    for whole_groups, released in ((False, ("a0", "b0", "b1")), (True, ("b0", "b1"))):
        ledger = AdvantageLedger(
            AdvantageConfig(), num_samples=9, clip=1.0, is_homogeneous=True, whole_groups=whole_groups
        )
        ledger.add(["a0", "a1", "a2"], ["a"] * 3, [1.0, 0.0, 2.0])
        ledger.add(["b0", "b1"], ["b"] * 2, [1.0, 1.0])
        assert ledger.take().keys == released
        rest = {"a0", "a1", "a2"} - {*released}
        assert {*ledger.take(is_last=True).keys} == rest


def mean_of_group(rows: JointRows, config: LossConfig) -> torch.Tensor:
    """Mean of the scalars over the rows of each row's group."""
    counts = torch.bincount(rows.groups).float()
    return (torch.zeros(len(counts)).index_add(0, rows.groups, rows.scalars) / counts)[rows.groups]


def test_a_joint_column_that_training_does_not_have_inputs_for_is_refused():
    joint = Joint("mine", ("std",), scalar=lambda rows: rows["std"], combine=mean_of_group)
    with pytest.raises(ValueError, match="columns of the joint column of the objective 'x' must be one of"):
        register_objective("x", config=ClampedConfig, points="forward", columns=("mine",), joint=joint)(
            lambda rows, config: LossOutput(rows.mean(rows["mine"]), {})
        )
