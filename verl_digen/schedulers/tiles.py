# SPDX-License-Identifier: Apache-2.0
"""Packing of a rank's rows into tiles. A tile is a micro-batch: the rows of one forward/backward.

Two shapes of a tile:

- `Grid(samples, steps)`: at most `samples` samples with at most `steps` rows each. The two are independent: (8, 1) is
  a batch of samples at one step each, (1, 8) one sample at eight steps. Each sample's rows are cut into the fewest
  even strips of at most `steps` rows; strips are ordered by lane (lane l has samples l, l + S, l + 2S, ... with
  S = `samples`) and assigned to tiles round-robin. A sample has no more strips than there are tiles, so each tile gets
  at most one of them; and neighbouring samples share tiles.
- `Budget(rows)`: at most `rows` consecutive rows of any samples and steps, in even parts.

With both, most rows of a tile belong to one prompt, so that its text needs no padding. Where a tile holds several
prompts, `order` sorts them by the lengths of their texts, so that neighbours are padded little. Each rank sorts its own
samples: tiles at the same position are then about as long on all ranks. For all ranks together:

- Rows of different buckets never share a tile, and tiles at the same position have the same bucket on all ranks: FSDP
  gathers the weights of one network at a time. Each bucket may have a shape of its own, as its rows have their size.
- A rank with fewer tiles than another (or with no rows) gets padding tiles of one row with weight 0.
- For a network that cannot mask padding, rows of different text lengths never share a tile (`agreed_most`). A rank does
  not know the texts of another's samples, so ranks then agree on the number of tiles.

Invariants (tests/schedulers/test_tiles.py): every row is in exactly one tile; the number of tiles is the minimum
for the shape, unless lengths are kept apart; all ranks have the same number; a rank's tiles of a bucket differ by at
most one strip, or one row; padding rows are as few as equal numbers of tiles allow. O(rows log rows).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from verl_digen.schedulers.deal import Row, stand_ins

TextOrder = Callable[[Row], tuple[int, ...]]
"""Row -> lengths of its texts; equal for rows that may share a forward without padding."""


def _as_they_come(row: Row) -> tuple[int, ...]:
    """Order for rows of one text length."""
    return ()


@dataclass(frozen=True)
class Grid:
    """Tiles of samples x steps."""

    samples: int
    """Maximum number of samples in a tile."""
    steps: int
    """Maximum number of rows of one sample in a tile."""

    @property
    def size(self) -> int:
        """Most rows of a tile."""
        return self.samples * self.steps

    def num_tiles(self, rows_by_sample: Sequence[int]) -> int:
        """Minimum number of tiles: max(strips of the largest sample, ceil(all strips / samples))."""
        strips = [-(-count // self.steps) for count in rows_by_sample]
        return max([*strips, -(-sum(strips) // self.samples)], default=0)

    def pack(self, rows: Sequence[Row], order: TextOrder = _as_they_come) -> list[tuple[Row, ...]]:
        """Rows of one rank and one bucket as tiles, each in order of sample and point."""
        by_sample: dict[int, list[Row]] = {}
        for row in _ordered(rows, order):
            by_sample.setdefault(row.sample, []).append(row)
        strips = [_even_parts(own, self.steps) for own in by_sample.values()]
        in_lanes = [strip for lane in range(self.samples) for own in strips[lane :: self.samples] for strip in own]
        tiles: list[list[Row]] = [[] for _ in range(self.num_tiles([len(own) for own in by_sample.values()]))]
        for position, strip in enumerate(in_lanes):
            tiles[position % len(tiles)] += strip
        return [tuple(sorted(tile)) for tile in tiles]


@dataclass(frozen=True)
class Budget:
    """Tiles of at most `rows` rows."""

    rows: int

    @property
    def size(self) -> int:
        """Most rows of a tile."""
        return self.rows

    def num_tiles(self, rows_by_sample: Sequence[int]) -> int:
        """Minimum number of tiles: ceil(all rows / rows)."""
        return -(-sum(rows_by_sample) // self.rows)

    def pack(self, rows: Sequence[Row], order: TextOrder = _as_they_come) -> list[tuple[Row, ...]]:
        """Rows of one rank and one bucket as tiles, each in order of sample and point."""
        return [tuple(sorted(part)) for part in _even_parts(_ordered(rows, order), self.rows)]


TileShape = Grid | Budget


def choose_shape(max_rows: int, *, samples: int | None = None, steps: int | None = None) -> TileShape:
    """Tile shape from the user's settings and the memory limit.

    Args:
        max_rows: rows that fit into memory; not read if both extents are given.
        samples, steps: the user's extents; None = automatic. If both are, samples and steps mix freely, which never
            needs more tiles than a grid.
    """
    if samples is None and steps is None:
        return Budget(max_rows)
    if samples is None:
        assert steps is not None
        return Grid(max(1, max_rows // steps), steps)
    return Grid(samples, max(1, max_rows // samples) if steps is None else steps)


@dataclass(frozen=True)
class Tile:
    """The rows of one forward/backward, by sample and point."""

    rows: tuple[Row, ...]
    is_filler: bool = False
    """True for a padding tile: one row of weight 0, run because other ranks have a tile."""


def plan_tiles(
    dealt: Sequence[Sequence[Row]],
    rank: int,
    shape: TileShape | Mapping[int, TileShape],
    *,
    order: TextOrder = _as_they_come,
    agreed_most: Callable[[int], int] | None = None,
) -> list[Tile]:
    """Tiles of `rank`; all ranks have the same number.

    Args:
        dealt: the rows of each rank, not all empty.
        shape: of every tile, or bucket -> shape of its tiles; the same on all ranks.
        order: of the rows of `rank`.
        agreed_most: maximum of all ranks' values, a collective. If given, rows that differ in `order` never share a
            tile.

    Example:
        dealt = [[Row(0, 0), Row(0, 1), Row(0, 2)], [Row(1, 0)]]
        plan_tiles(dealt, 0, Grid(1, 2))  # row (0,0) | rows (0,1) (0,2)
        plan_tiles(dealt, 1, Grid(1, 2))  # row (1,0) | row (1,0) of weight 0
    """
    tiles: list[Tile] = []
    for bucket, filler in sorted(stand_ins(dealt, rank).items()):
        of_bucket = shape[bucket] if isinstance(shape, Mapping) else shape
        mine = [row for row in dealt[rank] if row.bucket == bucket]
        if agreed_most is None:
            own = of_bucket.pack(mine, order)
            most = max(of_bucket.num_tiles(_rows_by_sample(hand, bucket)) for hand in dealt)
        else:
            own = [tile for alike in _by_text(mine, order) for tile in of_bucket.pack(alike)]
            most = agreed_most(len(own))
        tiles += [Tile(rows) for rows in own] + [Tile((filler,), is_filler=True)] * (most - len(own))
    return tiles


def _ordered(rows: Sequence[Row], order: TextOrder) -> list[Row]:
    """Rows by the lengths of their texts, then by sample and point."""
    return sorted(rows, key=lambda row: (order(row), row))


def _by_text(rows: Sequence[Row], order: TextOrder) -> list[list[Row]]:
    """Rows of each text length, shortest first."""
    alike: dict[tuple[int, ...], list[Row]] = {}
    for row in _ordered(rows, order):
        alike.setdefault(order(row), []).append(row)
    return list(alike.values())


def _even_parts(rows: Sequence[Row], size: int) -> list[Sequence[Row]]:
    """The fewest parts of at most `size` rows, whose lengths differ by at most one."""
    count = -(-len(rows) // size)
    bounds = [len(rows) * part // count for part in range(count + 1)] if rows else []
    return [rows[start:end] for start, end in pairwise(bounds)]


def _rows_by_sample(rows: Sequence[Row], bucket: int) -> list[int]:
    return list(Counter(row.sample for row in rows if row.bucket == bucket).values())
