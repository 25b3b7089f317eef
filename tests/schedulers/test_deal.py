# SPDX-License-Identifier: Apache-2.0
"""Partition of rows over ranks."""

import random
from collections import Counter

from tests.schedulers.rows import rows_of
from verl_digen.schedulers.tiles import Row, deal_rows, stand_ins


def assert_invariants(rows: list[Row], dealt: list[list[Row]], whole_samples: bool) -> None:
    """Check the module's invariants, the slow way."""
    assert Counter(row for hand in dealt for row in hand) == Counter(rows)
    for bucket in {row.bucket for row in rows}:
        own = [[row for row in hand if row.bucket == bucket] for hand in dealt]
        if not whole_samples:
            assert [row for hand in own for row in hand] == [row for row in rows if row.bucket == bucket]
            assert max(map(len, own)) - min(map(len, own)) <= 1
    counts = [len(hand) for hand in dealt]
    if not whole_samples:
        assert max(counts) - min(counts) <= 1
        return
    assert [row for hand in dealt for row in hand] == rows
    owners = {row.sample: {rank for rank, hand in enumerate(dealt) if row in hand} for row in rows}
    assert all(len(ranks) == 1 for ranks in owners.values())
    longest = max(Counter(row.sample for row in rows).values())
    assert max(counts) - min(counts) < 2 * longest


def random_rows(rng: random.Random) -> list[Row]:
    rows = rows_of([rng.choice([0, 1, 2, 5, 9]) for _ in range(rng.randint(1, 12))]) or [Row(0, 0)]
    boundary = rng.choice([0, 3, 99])  # like a model that switches experts along the schedule
    return [row._replace(bucket=int(row.point >= boundary)) for row in rows]


def test_every_row_is_dealt_once_and_evenly_for_many_sizes():
    rng = random.Random(0)
    for _ in range(600):
        rows, num_ranks, whole = random_rows(rng), rng.choice([1, 2, 3, 7, 16, 64]), rng.random() < 0.3
        dealt = deal_rows(rows, num_ranks, whole_samples=whole)
        assert_invariants(rows, dealt, whole)
        assert dealt == deal_rows(rows, num_ranks, whole_samples=whole)


def test_eight_samples_of_nine_steps_feed_sixteen_ranks():
    dealt = deal_rows(rows_of([9] * 8), 16)
    assert Counter(len(hand) for hand in dealt) == {4: 8, 5: 8}
    assert sum(len({row.sample for row in hand}) for hand in dealt) <= 8 + 15  # no more cuts than ranks


def test_whole_samples_that_divide_are_dealt_in_equal_blocks():
    dealt = deal_rows(rows_of([3] * 6), 3, whole_samples=True)
    assert [sorted({row.sample for row in hand}) for hand in dealt] == [[0, 1], [2, 3], [4, 5]]


def test_buckets_take_turns_at_what_does_not_divide():
    rows = [Row(sample, step, bucket=step) for sample in range(3) for step in range(2)]
    assert [len(hand) for hand in deal_rows(rows, 2)] == [3, 3]  # 2 + 1 and 1 + 2, not 2 + 2 and 1 + 1


def test_stand_ins_are_own_rows_where_there_are_any():
    dealt = [[Row(0, 0), Row(0, 2, 1)], [Row(1, 1)], []]
    assert stand_ins(dealt, 0) == {0: Row(0, 0), 1: Row(0, 2, 1)}
    assert stand_ins(dealt, 1) == {0: Row(1, 1), 1: Row(0, 2, 1)}
    assert stand_ins(dealt, 2) == {0: Row(0, 0), 1: Row(0, 2, 1)}
