# SPDX-License-Identifier: Apache-2.0
"""The cheapest pair of recomputed blocks and rows per tile, compared with all pairs that fit."""

from itertools import accumulate
from random import Random

import pytest

from verl_digen.schedulers.tiles import (
    TILE_COST,
    WHOLE_TILE_COST,
    Budget,
    Grid,
    TileChoice,
    choose_tile,
    prefers_whole_base,
)


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
