# SPDX-License-Identifier: Apache-2.0
"""Partition of rows over ranks and tiles: descriptions and samples -> this rank's `TileWork`.

- Every rank partitions all rows over the ranks by itself and fetches the samples of its own rows; nothing is exchanged.
- Rows per tile under `auto` are measured once per sampling, on all ranks together, with masked tiles of the longest
  prompt at hand; the minimum over the ranks counts. On a CPU the number is fixed.

Invariant: all ranks make the same plan, so that all run the same number of tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils.device import get_device_name

from verl_digen.config import TspConfig
from verl_digen.engine import memory
from verl_digen.engine.fragment import FragmentSample, fragment_rows
from verl_digen.engine.points import Picks, Points
from verl_digen.engine.rows import Fetch, Samples, make_rows
from verl_digen.engine.tile_work import AllRows, TileWork
from verl_digen.schedulers.deal import Row, deal_rows, stand_ins
from verl_digen.schedulers.tiles import TileShape, choose_shape, plan_tiles
from verl_digen.types import Sampling, TrainingRows

logger = logging.getLogger(__name__)


class Planner:
    """See the module.

    Args:
        group: the data-parallel ranks.
        points: kind of the rows.
        rehearse: dry run of rows as in training, to measure memory.
    """

    def __init__(
        self,
        tsp: TspConfig,
        group: dist.ProcessGroup,
        points: Points,
        rehearse: Callable[[TrainingRows], None],
    ):
        self.tsp, self.group, self.points, self.rehearse = tsp, group, points, rehearse
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._rows_that_fit: dict[Sampling, int] = {}

    def deal(self, samples: Sequence[FragmentSample], advantages: Tensor, fetch: Fetch) -> TileWork:
        """This rank's part of these samples' rows, of which there is at least one; a padding row if it gets none.

        Args:
            advantages: [samples] fp32.
        """
        rows = fragment_rows(samples)
        dealt = deal_rows(rows, self.num_ranks, whole_samples=not self.tsp.enable)
        chosen = [*dealt[self.rank], *stand_ins(dealt, self.rank).values()]
        needed = sorted({row.sample for row in chosen})
        own = replace(fetch([samples[number] for number in needed]), advantages=advantages[needed])
        places = {number: place for place, number in enumerate(needed)}
        tiles = plan_tiles(dealt, self.rank, self._shapes(chosen, own, places))
        return TileWork(own, places, tiles, AllRows(rows, [sample.uid for sample in samples], advantages))

    def _shapes(self, rows: Sequence[Row], own: Samples, places: Mapping[int, int]) -> dict[int, TileShape]:
        """Bucket -> shape of its tiles, the same on all ranks, each of which has a row of every bucket in `rows`."""
        num_samples, num_steps = self.tsp.extents
        shapes: dict[int, TileShape] = {}
        for bucket in sorted({row.bucket for row in rows}):
            picks = [(places[row.sample], [row.point]) for row in rows if row.bucket == bucket]
            most = 1 if num_samples and num_steps else self._measured_rows(own, picks)
            shapes[bucket] = choose_shape(most, samples=num_samples, steps=num_steps)
        return shapes

    def _measured_rows(self, samples: Samples, picks: Picks) -> int:
        """Rows like the picked ones, of one bucket, that fit into memory in one tile."""
        if get_device_name() == "cpu":
            return memory.CPU_ROWS
        sampling = samples.described[picks[0][0]].sampling
        if sampling not in self._rows_that_fit:

            def peak_bytes(num_rows: int) -> int:
                rows = self._rehearsal(samples, picks, num_rows)
                return memory.peak_of(lambda: self.rehearse(rows))

            fit = memory.rows_that_fit(peak_bytes, memory.limit_bytes())
            self._rows_that_fit[sampling] = memory.agreed_least(fit, self.group)
            logger.info("tiles hold up to %d rows of %s", self._rows_that_fit[sampling], sampling.geometry)
        return self._rows_that_fit[sampling]

    def _rehearsal(self, samples: Samples, picks: Picks, num_rows: int) -> TrainingRows:
        """`num_rows` copies of the picked row with the longest prompt, masked out; for the memory probe."""

        def length(pick: tuple[int, Sequence[int]]) -> int:
            return sum(tensor.numel() for tensor in samples.conditions[pick[0]][0].values())

        rows = make_rows(self.points, samples, [max(picks, key=length)] * num_rows)
        return replace(rows, mask=torch.zeros(num_rows))
