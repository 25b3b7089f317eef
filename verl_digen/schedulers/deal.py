# SPDX-License-Identifier: Apache-2.0
"""Time-step parallelism: the rows of a fragment, dealt over the data-parallel ranks.

- Training on a recorded trajectory has no order in time, so a row, not a sample, is what is dealt: 8 samples of 9
  trained steps feed 16 ranks with 4 or 5 rows each.
- Ranks take consecutive rows, so that a sample is cut at as few places as the even numbers allow: rows of one
  sample share its latents, rows of one prompt its conditions.
- Rows of different experts run different networks, and all ranks must run the same one at a time; so each expert's
  rows are dealt by themselves, and ranks take turns at the rows that do not divide.
- Every rank computes the whole deal by itself, from the same description: nothing is exchanged.

Invariants (tests/schedulers/test_deal.py): every row is dealt exactly once, in order; ranks' numbers of rows differ
by at most one, of each expert and in all (with `whole_samples`: by less than two samples' rows, and no sample is
cut). O(rows + ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One (sample, trained step) pair."""

    sample: int
    """Index of the sample in its fragment."""
    step: int
    """Which of the sample's K trained steps, 0 to K-1."""
    expert: int = 0
    """Which network the step runs, where the model has several."""


def rows_of(num_steps: Sequence[int]) -> list[Row]:
    """All rows of samples with these numbers of trained steps, sample after sample.

    Example:
        rows_of([2, 0, 1])  # [Row(0, 0), Row(0, 1), Row(2, 0)]
    """
    return [Row(sample, step) for sample, count in enumerate(num_steps) for step in range(count)]


def deal_rows(rows: Sequence[Row], num_ranks: int, *, whole_samples: bool = False) -> list[list[Row]]:
    """The rows of each rank.

    Args:
        rows: sample after sample.
        whole_samples: never cut a sample, as for a loss over a whole trajectory, or to train without time-step
            parallelism; ranks are then as even as consecutive whole samples allow.

    Example, rows written as (sample, step):
        deal_rows(rows_of([3, 1]), 2)                      # (0,0) (0,1)       | (0,2) (1,0)
        deal_rows(rows_of([3, 1]), 2, whole_samples=True)  # (0,0) (0,1) (0,2) | (1,0)
    """
    return _deal_samples(rows, num_ranks) if whole_samples else _deal_single(rows, num_ranks)


def _deal_single(rows: Sequence[Row], num_ranks: int) -> list[list[Row]]:
    dealt: list[list[Row]] = [[] for _ in range(num_ranks)]
    turn = 0  # the rank whose turn it is to take a row more than others
    for expert in sorted({row.expert for row in rows}):
        own = [row for row in rows if row.expert == expert]
        least, rest = divmod(len(own), num_ranks)
        extra = {(turn + offset) % num_ranks for offset in range(rest)}
        turn = (turn + rest) % num_ranks
        start = 0
        for rank, hand in enumerate(dealt):
            end = start + least + (rank in extra)
            hand += own[start:end]
            start = end
    return dealt


def _deal_samples(rows: Sequence[Row], num_ranks: int) -> list[list[Row]]:
    """A sample goes to the rank in whose even share of the rows its middle lies."""
    dealt: list[list[Row]] = [[] for _ in range(num_ranks)]
    start = 0
    while start < len(rows):
        end = start
        while end < len(rows) and rows[end].sample == rows[start].sample:
            end += 1
        dealt[(start + end) * num_ranks // (2 * len(rows))] += rows[start:end]
        start = end
    return dealt


def stand_ins(dealt: Sequence[Sequence[Row]], rank: int) -> dict[int, Row]:
    """For each expert the row that `rank` runs with weight 0 where other ranks have tiles and it has none left:
    its own first row of the expert, or else the first that was dealt."""
    chosen: dict[int, Row] = {}
    for hand in (dealt[rank], *dealt):
        for row in hand:
            chosen.setdefault(row.expert, row)
    return chosen
