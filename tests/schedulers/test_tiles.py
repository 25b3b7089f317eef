# SPDX-License-Identifier: Apache-2.0
"""Packing of a rank's rows into tiles, and the choice of their size, compared with all others that fit."""

import random
from collections import Counter
from itertools import accumulate
from random import Random

import pytest

from tests.schedulers.rows import rows_of
from tests.schedulers.test_deal import random_rows
from verl_digen.schedulers.tiles import (
    TILE_COST,
    WHOLE_TILE_COST,
    Budget,
    Grid,
    Row,
    Tile,
    TileChoice,
    TileShape,
    choose_shape,
    choose_tile,
    deal_rows,
    plan_tiles,
    prefers_whole_base,
)


def rows_by_sample(rows) -> Counter[int]:
    return Counter(row.sample for row in rows)


def least_tiles(rows, shape: TileShape) -> int:
    """Minimum number of tiles of any packing, given a tile's limits on rows or on samples and rows per sample."""
    if isinstance(shape, Budget):
        return -(-len(rows) // shape.rows)
    strips = [-(-count // shape.steps) for count in rows_by_sample(rows).values()]
    return max([0, *strips, -(-sum(strips) // shape.samples)])


def size(tile: Tile, shape: TileShape) -> int:
    """Size of a tile in the unit that is spread evenly over a rank's tiles: strips, or rows."""
    return len(tile.rows) if isinstance(shape, Budget) else len(rows_by_sample(tile.rows))


def assert_fits(tile: Tile, shape: TileShape) -> None:
    counts = rows_by_sample(tile.rows)
    if isinstance(shape, Budget):
        assert 1 <= len(tile.rows) <= shape.rows
    else:
        assert 1 <= len(counts) <= shape.samples and max(counts.values()) <= shape.steps
    assert len({row.bucket for row in tile.rows}) == 1
    assert len(tile.rows) == 1 or not tile.is_filler
    assert list(tile.rows) == sorted(tile.rows)


def assert_invariants(dealt: list[list[Row]], plans: list[list[Tile]], shape: TileShape) -> None:
    """Check the module's invariants, the slow way."""
    for hand, tiles in zip(dealt, plans, strict=True):
        real = [row for tile in tiles if not tile.is_filler for row in tile.rows]
        assert Counter(real) == Counter(hand)
        for tile in tiles:
            assert_fits(tile, shape)
    assert len({tuple(tile.rows[0].bucket for tile in tiles) for tiles in plans}) == 1  # equal on all ranks
    for bucket in sorted({row.bucket for hand in dealt for row in hand}):
        least = [least_tiles([row for row in hand if row.bucket == bucket], shape) for hand in dealt]
        for own, tiles in zip(least, plans, strict=True):
            here = [tile for tile in tiles if tile.rows[0].bucket == bucket]
            assert len(here) == max(least)
            assert sum(tile.is_filler for tile in here) == max(least) - own
            sizes = [size(tile, shape) for tile in here if not tile.is_filler]
            assert not sizes or max(sizes) - min(sizes) <= 1


def test_every_row_is_in_one_tile_of_the_fewest_for_many_sizes():
    rng = random.Random(1)
    for _ in range(800):
        rows, num_ranks = random_rows(rng), rng.choice([1, 2, 3, 8, 20])
        grid = Grid(rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 4, 9]))
        shape = rng.choice([grid, Budget(grid.samples * grid.steps)])
        dealt = deal_rows(rows, num_ranks, whole_samples=rng.random() < 0.3)
        seed = rng.random()
        plans = [
            plan_tiles(dealt, rank, shape, order=lambda sample, seed=seed: (hash((seed, sample)) % 5,))
            for rank in range(num_ranks)
        ]
        assert_invariants(dealt, plans, shape)


def test_text_lengths_are_kept_apart_in_as_many_tiles_on_each_rank():
    rng = random.Random(3)
    for _ in range(300):
        rows, num_ranks = random_rows(rng), rng.choice([1, 2, 3, 8])
        grid = Grid(rng.choice([1, 2, 8]), rng.choice([1, 4, 9]))
        shape = rng.choice([grid, Budget(grid.samples * grid.steps)])
        dealt = deal_rows(rows, num_ranks)
        lengths = [rng.choice([3, 5, 8]) for _ in range(1 + max(row.sample for row in rows))]

        def order(row: Row, lengths: list[int] = lengths) -> tuple[int, ...]:
            return (lengths[row.sample],)

        counts: list[list[int]] = [[] for _ in range(num_ranks)]
        for rank, own in enumerate(counts):  # what each rank asks for, bucket after bucket
            plan_tiles(dealt, rank, shape, order=order, agreed_most=lambda most, own=own: own.append(most) or most)
        most = [max(own) for own in zip(*counts, strict=True)]
        plans = []
        for rank in range(num_ranks):
            agreed = iter(most)
            plans.append(
                plan_tiles(dealt, rank, shape, order=order, agreed_most=lambda own, agreed=agreed: next(agreed))
            )
        assert {len(tiles) for tiles in plans} == {sum(most)}
        for hand, tiles in zip(dealt, plans, strict=True):
            assert Counter(row for tile in tiles if not tile.is_filler for row in tile.rows) == Counter(hand)
            for tile in tiles:
                assert_fits(tile, shape)
                assert len({lengths[row.sample] for row in tile.rows}) == 1
        assert len({tuple(tile.rows[0].bucket for tile in tiles) for tiles in plans}) == 1


@pytest.mark.parametrize("shape", [Grid(2, 1), Budget(2)])
def test_samples_of_like_text_length_share_tiles(shape: TileShape):
    lengths = [10, 90, 11, 91]
    tiles = plan_tiles([rows_of([1] * 4)], 0, shape, order=lambda row: (lengths[row.sample],))
    assert [[row.sample for row in tile.rows] for tile in tiles] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Grid(2, 9), [[(0, range(9)), (1, range(9))], [(2, range(9)), (3, range(9))]]),
        (Grid(4, 1), [[(sample, [step]) for sample in range(4)] for step in range(9)]),
        (Grid(4, 3), [[(sample, range(at, at + 3)) for sample in range(4)] for at in (0, 3, 6)]),
    ],
)
def test_a_grid_that_divides_is_cut_into_blocks(shape: Grid, expected: list):
    tiles = shape.pack(rows_of([9] * 4))
    assert tiles == [tuple(Row(sample, step) for sample, steps in tile for step in steps) for tile in expected]


def test_strips_are_even_so_that_no_tile_is_much_larger_than_another():
    assert [len(tile) for tile in Grid(1, 4).pack(rows_of([9]))] == [3, 3, 3]  # not 4, 4, 1


def test_a_budget_takes_rows_as_they_come_in_even_parts():
    tiles = Budget(8).pack(rows_of([9, 9, 9]))
    assert [len(tile) for tile in tiles] == [6, 7, 7, 7]  # a grid of 8 rows would need 5 tiles
    assert [row for tile in tiles for row in tile] == rows_of([9, 9, 9])


@pytest.mark.parametrize(
    ("samples", "steps", "expected"),
    [
        (None, None, Budget(8)),
        (2, None, Grid(2, 4)),
        (None, 3, Grid(2, 3)),
        (20, None, Grid(20, 1)),
        (3, 5, Grid(3, 5)),  # independent of the memory limit
    ],
)
def test_what_the_user_leaves_open_is_filled_up(samples: int | None, steps: int | None, expected: TileShape):
    assert choose_shape(8, samples=samples, steps=steps) == expected


@pytest.mark.parametrize(("is_whole", "tile_cost"), [(False, TILE_COST), (True, WHOLE_TILE_COST)])
def test_no_other_pair_that_fits_is_cheaper_or_as_cheap_with_fewer_blocks(is_whole: bool, tile_cost: float):
    rng = Random(0)
    for _ in range(500):
        num_blocks, num_rows = rng.randint(1, 12), rng.randint(1, 20)
        fitting = list(accumulate(rng.choice((0, 0, 1, 3)) for _ in range(num_blocks + 1)))
        pairs = [
            (num_rows * blocks / num_blocks + tile_cost * -(-num_rows // size), blocks)
            for blocks, most in enumerate(fitting)
            for size in range(1, min(most, num_rows) + 1)
        ]
        found = choose_tile(fitting.__getitem__, num_blocks=num_blocks, num_rows=num_rows, is_whole=is_whole)
        size = min(found.shape.size, num_rows)
        if not pairs:  # nothing fits: the smallest tile is tried
            assert (found.num_recomputed, size) == (num_blocks, 1)
            continue
        assert size <= fitting[found.num_recomputed]
        cost = num_rows * found.num_recomputed / num_blocks + tile_cost * -(-num_rows // size)
        least = min(cost for cost, _ in pairs)
        assert cost == pytest.approx(least)
        assert found.num_recomputed == min(blocks for cost, blocks in pairs if cost == pytest.approx(least))


def test_without_a_limit_nothing_is_recomputed():
    assert choose_tile(lambda blocks: 1 << 40, num_blocks=40, num_rows=100).num_recomputed == 0


def test_blocks_are_recomputed_until_the_users_tile_fits_and_for_no_row_that_is_not_there():
    assert choose_tile(lambda blocks: blocks, num_blocks=8, num_rows=9, samples=2, steps=3) == TileChoice(6, Grid(2, 3))
    assert choose_tile(lambda blocks: blocks, num_blocks=8, num_rows=4, samples=2, steps=3) == TileChoice(4, Grid(2, 3))


def test_a_whole_base_pays_where_it_saves_more_tiles_than_it_costs_blocks():
    few, more = TileChoice(0, Budget(8)), TileChoice(10, Budget(8))
    assert prefers_whole_base(few, few, num_blocks=40, num_rows=8)
    assert prefers_whole_base(few, more, num_blocks=40, num_rows=1)
    assert not prefers_whole_base(few, more, num_blocks=40, num_rows=8)
