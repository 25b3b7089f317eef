# SPDX-License-Identifier: Apache-2.0
"""Rows per tile and recomputed blocks, together: the cheapest pair that fits into memory.

- A forward and backward costs a row 3 forwards; recomputing all blocks costs a fourth. So `n` of `N` recomputed blocks
  cost n / N of a forward per row.
- They free memory for more rows per tile. A tile costs `TILE_COST` forwards of one row beside its rows: weights that
  are gathered before the first block, launches of small kernels. So few rows per tile are worth recomputation, many
  are not: from 1 row to 2 a fourth of the blocks, from 8 to 16 a thirtieth.
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
) -> TileChoice:
    """Choose by the cost in the module's docstring.

    Args:
        rows_that_fit: number of recomputed blocks -> rows of one tile that fit; less than 1 if none does.
        num_blocks: blocks that can be recomputed.
        num_rows: most rows of any rank.
        samples, steps: the user's extents of a tile; None = automatic.

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
        cost = num_rows * num_recomputed / max(num_blocks, 1) + TILE_COST * -(-num_rows // size)
        if best is None or cost < best[0]:
            best = cost, TileChoice(num_recomputed, shape)
    assert best is not None
    return best[1]
