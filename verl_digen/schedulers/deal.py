# SPDX-License-Identifier: Apache-2.0
"""Time-step parallelism: partition the rows of a fragment over the data-parallel ranks.

- Training on a recorded trajectory has no order in time, so rows, not samples, are assigned to ranks: 8 samples of 9
  trained steps feed 16 ranks with 4 or 5 rows each.
- Ranks take consecutive rows, so that an even split cuts samples at as few places as possible: rows of one sample share
  its latents, rows of one prompt its conditions.
- A bucket holds the rows that may share a forward: rows of one network (expert) and one kind of sampling (geometry,
  guidance). All ranks must run the same network at a time; so each bucket's rows are partitioned separately, and the
  rows left over from an even division go to ranks round-robin.

Invariants (tests/schedulers/test_deal.py): every row is assigned exactly once, in order; ranks' numbers of rows differ
by at most one, per bucket and in total (with `whole_samples`: by less than two samples' rows, and no sample is cut).
O(rows + ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One (sample, point) pair."""

    sample: int
    """Index of the sample in its fragment."""
    point: int
    """Index among the sample's K points, 0 to K-1."""
    bucket: int = 0
    """Number of the rows that it may share a forward with."""


def deal_rows(rows: Sequence[Row], num_ranks: int, *, whole_samples: bool = False) -> list[list[Row]]:
    """The rows of each rank, from rows sorted by sample. With `whole_samples`, to train without time-step parallelism,
    no sample is cut; ranks are then as even as whole consecutive samples allow.

    Example, three rows of one sample and one of the next, written as (sample, point):
        deal_rows(rows, 2)                      # (0,0) (0,1)       | (0,2) (1,0)
        deal_rows(rows, 2, whole_samples=True)  # (0,0) (0,1) (0,2) | (1,0)
    """
    return _deal_samples(rows, num_ranks) if whole_samples else _deal_single(rows, num_ranks)


def _deal_single(rows: Sequence[Row], num_ranks: int) -> list[list[Row]]:
    dealt: list[list[Row]] = [[] for _ in range(num_ranks)]
    turn = 0  # the next rank to take an extra row
    for bucket in sorted({row.bucket for row in rows}):
        own = [row for row in rows if row.bucket == bucket]
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
    """Assign each sample to the rank whose even share of the rows contains the sample's middle."""
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
    """Padding row of `rank` for each bucket, run with weight 0 where other ranks have more tiles: its own first row of
    the bucket, or else the first one of any rank."""
    chosen: dict[int, Row] = {}
    for hand in (dealt[rank], *dealt):
        for row in hand:
            chosen.setdefault(row.bucket, row)
    return chosen
