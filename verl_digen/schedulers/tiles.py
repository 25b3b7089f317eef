# SPDX-License-Identifier: Apache-2.0
"""Time-step parallelism: partition of a fragment's rows over the data-parallel ranks, packing of a rank's rows into
tiles, and the choice of their size. A tile is a micro-batch: the rows of one forward/backward.

Ranks:

- Training on a recorded trajectory has no order in time, so rows, not samples, are assigned to ranks: 8 samples of 9
  trained steps feed 16 ranks with 4 or 5 rows each.
- Ranks take consecutive rows, so that an even split cuts samples at as few places as possible: rows of one sample share
  its latents, rows of one prompt its conditions.
- A bucket holds the rows that may share a forward: rows of one network (expert) and one kind of sampling (geometry,
  guidance). All ranks must run the same network at a time; so each bucket's rows are partitioned separately, and the
  rows left over from an even division go to ranks round-robin.

Tiles: most rows of a tile belong to one prompt, so that its text needs no padding. Where a tile holds several prompts,
`order` sorts them by the lengths of their texts, so that neighbours are padded little. Each rank sorts its own samples:
tiles at the same position are then about as long on all ranks. For all ranks together:

- Rows of different buckets never share a tile, and tiles at the same position have the same bucket on all ranks: FSDP
  gathers the weights of one network at a time. Each bucket may have a shape of its own, as its rows have their size.
- A rank with fewer tiles than another (or with no rows) gets padding tiles of one row with weight 0.
- For a network that cannot mask padding, rows of different text lengths never share a tile (`agreed_most`). A rank does
  not know the texts of another's samples, so ranks then agree on the number of tiles.

Invariants (tests/schedulers/test_deal.py): every row is assigned exactly once, in order; ranks' numbers of rows differ
by at most one, per bucket and in total (with `whole_samples`: by less than two samples' rows, and no sample is cut).
O(rows + ranks).

Invariants (tests/schedulers/test_tiles.py): every row is in exactly one tile; the number of tiles is the minimum for
the shape, unless lengths are kept apart; all ranks have the same number; a rank's tiles of a bucket differ by at most
one strip, or one row; padding rows are as few as equal numbers of tiles allow. O(rows log rows).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
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
    for _, of_sample in groupby(rows, key=lambda row: row.sample):
        own = list(of_sample)
        dealt[(2 * start + len(own)) * num_ranks // (2 * len(rows))] += own
        start += len(own)
    return dealt


def stand_ins(dealt: Sequence[Sequence[Row]], rank: int) -> dict[int, Row]:
    """Padding row of `rank` for each bucket, run with weight 0 where other ranks have more tiles: its own first row of
    the bucket, or else the first one of any rank."""
    chosen: dict[int, Row] = {}
    for hand in (dealt[rank], *dealt):
        for row in hand:
            chosen.setdefault(row.bucket, row)
    return chosen


@dataclass(frozen=True)
class Grid:
    """Tiles of at most `samples` samples with at most `steps` rows each: (8, 1) is a batch of samples at one step each,
    (1, 8) one sample at eight steps.

    Each sample's rows are cut into the fewest even strips of at most `steps` rows; strips are ordered by lane (lane l
    has samples l, l + S, l + 2S, ... with S = `samples`) and assigned to tiles round-robin. A sample has no more strips
    than there are tiles, so each tile gets at most one of them; and neighbouring samples share tiles.
    """

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

    def pack(self, rows: Sequence[Row]) -> list[tuple[Row, ...]]:
        """Rows of one rank and one bucket as tiles, each in order of sample and point."""
        by_sample: dict[int, list[Row]] = {}
        for row in rows:
            by_sample.setdefault(row.sample, []).append(row)
        strips = [_even_parts(own, self.steps) for own in by_sample.values()]
        in_lanes = [strip for lane in range(self.samples) for own in strips[lane :: self.samples] for strip in own]
        tiles: list[list[Row]] = [[] for _ in range(self.num_tiles([len(own) for own in by_sample.values()]))]
        for position, strip in enumerate(in_lanes):
            tiles[position % len(tiles)] += strip
        return [tuple(sorted(tile)) for tile in tiles]


@dataclass(frozen=True)
class Budget:
    """Tiles of at most `rows` consecutive rows of any samples and steps, in even parts."""

    rows: int

    @property
    def size(self) -> int:
        """Most rows of a tile."""
        return self.rows

    def num_tiles(self, rows_by_sample: Sequence[int]) -> int:
        """Minimum number of tiles: ceil(all rows / rows)."""
        return -(-sum(rows_by_sample) // self.rows)

    def pack(self, rows: Sequence[Row]) -> list[tuple[Row, ...]]:
        """Rows of one rank and one bucket as tiles, each in order of sample and point."""
        return [tuple(sorted(part)) for part in _even_parts(rows, self.rows)]


TileShape = Grid | Budget


def choose_shape(max_rows: int, *, samples: int | None = None, steps: int | None = None) -> TileShape:
    """Tile shape from the user's extents (None = automatic), and the rows that fit into memory, `max_rows`, which are
    not read if both extents are given. If both are automatic, samples and steps mix freely, which never needs more
    tiles than a grid."""
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
    order: Callable[[Row], tuple[int, ...]] = lambda row: (),
    agreed_most: Callable[[int], int] | None = None,
) -> list[Tile]:
    """Tiles of `rank`; all ranks have the same number.

    Args:
        dealt: the rows of each rank, not all empty.
        shape: of every tile, or bucket -> shape of its tiles; the same on all ranks.
        order: lengths of the texts of a row of `rank`.
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
        mine = sorted((row for row in dealt[rank] if row.bucket == bucket), key=lambda row: (order(row), row))
        if agreed_most is None:
            own = of_bucket.pack(mine)
            by_sample = [Counter(row.sample for row in hand if row.bucket == bucket) for hand in dealt]
            most = max(of_bucket.num_tiles([*counts.values()]) for counts in by_sample)
        else:
            own = [tile for _, alike in groupby(mine, order) for tile in of_bucket.pack(list(alike))]
            most = agreed_most(len(own))
        tiles += [Tile(rows) for rows in own] + [Tile((filler,), is_filler=True)] * (most - len(own))
    return tiles


def _even_parts(rows: Sequence[Row], size: int) -> list[Sequence[Row]]:
    """The fewest parts of at most `size` rows, whose lengths differ by at most one."""
    count = -(-len(rows) // size)
    bounds = [len(rows) * part // count for part in range(count + 1)] if rows else []
    return [rows[start:end] for start, end in pairwise(bounds)]


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
    """Choose rows per tile and recomputed blocks together: the cheapest pair that fits into memory.

    - A forward and backward costs a row 3 forwards; recomputing all blocks costs a fourth. So `n` of `N` recomputed
      blocks cost n / N of a forward per row.
    - They free memory for more rows per tile. A tile costs `TILE_COST` forwards of one row beside its rows: weights
      that are gathered before the first block, launches of small kernels. So few rows per tile are worth recomputation,
      many are not: from 1 row to 2 a fourth of the blocks, from 8 to 16 a thirtieth.
    - A frozen base that is whole on every rank, `is_whole`, is not gathered; a tile costs `WHOLE_TILE_COST` beside its
      rows.
    - Of `num_rows`, the most rows of any rank, whole tiles are counted: no block is recomputed for room that no row
      takes.
    - Extents that the user gives are kept: blocks are recomputed until that tile fits.

    Invariants (tests/schedulers/test_tiles.py): no other pair that fits is cheaper, or as cheap with fewer blocks
    recomputed; without a limit nothing is recomputed. O(blocks).

    Args:
        rows_that_fit: number of recomputed blocks -> rows of one tile that fit; less than 1 if none does.
        samples, steps: the user's extents of a tile; None = automatic.

    Example: 40 blocks, and one more row per tile for every 8 that are recomputed
        choose_tile(lambda n: 1 + n // 8, num_blocks=40, num_rows=2)  # 8 blocks, tiles of 2 rows
        choose_tile(lambda n: 1 + n // 8, num_blocks=40, num_rows=1)  # none
    """
    choices: list[TileChoice] = []
    for num_recomputed in range(num_blocks + 1):
        most = rows_that_fit(num_recomputed)
        shape = choose_shape(max(1, most), samples=samples, steps=steps)
        if most >= min(shape.size, num_rows) or num_recomputed == num_blocks:
            choices.append(TileChoice(num_recomputed, shape))
    return min(choices, key=partial(_cost, num_blocks=num_blocks, num_rows=num_rows, is_whole=is_whole))


def prefers_whole_base(sharded: TileChoice, whole: TileChoice, *, num_blocks: int, num_rows: int) -> bool:
    """True if tiles beside a whole base, which takes memory from rows and kept blocks, cost less than those with a
    sharded one, or as much. Both must fit.

    Example: beside the whole base, 10 blocks more of 40 are recomputed
        few, more = TileChoice(0, Grid(2, 4)), TileChoice(10, Grid(2, 4))
        prefers_whole_base(few, more, num_blocks=40, num_rows=8)  # False: 2.1 forwards, against 0.5
        prefers_whole_base(few, more, num_blocks=40, num_rows=1)  # True: 0.35, against 0.5
    """
    cost = partial(_cost, num_blocks=num_blocks, num_rows=num_rows)
    return cost(whole, is_whole=True) <= cost(sharded, is_whole=False)


def _cost(choice: TileChoice, *, num_blocks: int, num_rows: int, is_whole: bool) -> float:
    """Cost of the rows' tiles, in forwards of one row, without the three of each row."""
    recomputed = num_rows * choice.num_recomputed / max(num_blocks, 1)
    return recomputed + (WHOLE_TILE_COST if is_whole else TILE_COST) * -(-num_rows // choice.shape.size)
