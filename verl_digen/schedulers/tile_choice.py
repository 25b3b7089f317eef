# SPDX-License-Identifier: Apache-2.0
"""Rows per tile and recomputed blocks, together: the cheapest pair that fits into memory.

- A forward and backward costs a row 3 forwards; recomputing all blocks costs a fourth. So `n` of `N` recomputed blocks
  cost n / N of a forward per row.
- They free memory for more rows per tile. A tile costs `TILE_COST` forwards of one row beside its rows: weights that
  are gathered before the first block, launches of small kernels. So few rows per tile are worth recomputation, many
  are not: from 1 row to 2 a fourth of the blocks, from 8 to 16 a thirtieth.
- A frozen base that is whole on every rank is not gathered; a tile costs `WHOLE_TILE_COST` beside its rows. It takes
  memory from rows and kept blocks: `prefers_whole_base` compares the cheapest pairs with and without.
- Rows of one fragment are counted, in whole tiles: no block is recomputed for room that no row takes.
- Extents that the user gives are kept: blocks are recomputed until that tile fits.

Invariants (tests/schedulers/test_tile_choice.py): no other pair that fits is cheaper, or as cheap with fewer blocks
recomputed; without a limit nothing is recomputed. O(blocks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verl_digen.schedulers.tiles import TileShape, choose_shape

TILE_COST = 0.5
"""Cost of a tile beside its rows, in forwards of one row. An estimate: on NVLink the gathering of 20 B parameters hides
behind the computation of a row of 4 k tokens, except before the first block; between nodes it does not."""

WHOLE_TILE_COST = 0.1
"""Cost of a tile beside its rows where no base is gathered, in forwards of one row: launches alone. An estimate."""


@dataclass(frozen=True)
class TileChoice:
    """Tiles of a fragment's rows of one kind."""

    num_recomputed: int
    """Blocks recomputed in backward, the first ones."""
    shape: TileShape


def choose_tile(
    rows_that_fit: Callable[[int], int],
    *,
    num_blocks: int,
    num_rows: int,
    samples: int | None = None,
    steps: int | None = None,
    is_whole: bool = False,
) -> TileChoice:
    """Choose by the cost in the module's docstring.

    Args:
        rows_that_fit: number of recomputed blocks -> rows of one tile that fit; less than 1 if none does.
        num_blocks: blocks that can be recomputed.
        num_rows: most rows of any rank.
        samples, steps: the user's extents of a tile; None = automatic.
        is_whole: True if the base is whole on every rank.

    Example: 40 blocks, and one more row per tile for every 8 that are recomputed
        choose_tile(lambda n: 1 + n // 8, num_blocks=40, num_rows=2)  # 8 blocks, tiles of 2 rows
        choose_tile(lambda n: 1 + n // 8, num_blocks=40, num_rows=1)  # none
    """
    best: tuple[float, TileChoice] | None = None
    for num_recomputed in range(num_blocks + 1):
        most = rows_that_fit(num_recomputed)
        shape = choose_shape(max(1, most), samples=samples, steps=steps)
        size = shape.size
        if most < min(size, num_rows) and num_recomputed < num_blocks:
            continue
        choice = TileChoice(num_recomputed, shape)
        cost = _cost(choice, num_blocks=num_blocks, num_rows=num_rows, is_whole=is_whole)
        if best is None or cost < best[0]:
            best = cost, choice
    assert best is not None
    return best[1]


def prefers_whole_base(sharded: TileChoice, whole: TileChoice, *, num_blocks: int, num_rows: int) -> bool:
    """True if tiles beside a whole base cost less than those with a sharded one, or as much. Both must fit.

    Example: beside the whole base, 10 blocks more of 40 are recomputed
        few, more = TileChoice(0, TileShape(2, 4, False)), TileChoice(10, TileShape(2, 4, False))
        prefers_whole_base(few, more, num_blocks=40, num_rows=8)  # False: 2.1 forwards, against 0.5
        prefers_whole_base(few, more, num_blocks=40, num_rows=1)  # True: 0.35, against 0.5
    """
    costs = (
        _cost(choice, num_blocks=num_blocks, num_rows=num_rows, is_whole=is_whole)
        for choice, is_whole in ((whole, True), (sharded, False))
    )
    with_whole, without = costs
    return with_whole <= without


def _cost(choice: TileChoice, *, num_blocks: int, num_rows: int, is_whole: bool) -> float:
    """Cost of the rows' tiles, in forwards of one row, without the three of each row."""
    recomputed = num_rows * choice.num_recomputed / max(num_blocks, 1)
    return recomputed + (WHOLE_TILE_COST if is_whole else TILE_COST) * -(-num_rows // choice.shape.size)
