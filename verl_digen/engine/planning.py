# SPDX-License-Identifier: Apache-2.0
"""Partition of rows over ranks and tiles: descriptions and samples -> this rank's `TileWork`.

- Every rank partitions all rows over the ranks by itself and fetches the samples of its own rows; nothing is exchanged.
- Rows per tile under `auto` are measured once per shape of latents, on all ranks together, with masked tiles of the
  longest prompt at hand; the minimum over the ranks counts. On a CPU the number is fixed.

Invariant: all ranks make the same plan, so that all run the same number of tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils.device import get_device_name

from verl_digen.config import TspConfig
from verl_digen.engine import memory
from verl_digen.engine.fragment import Fetch, FragmentSample, fragment_rows
from verl_digen.engine.rows import Samples, make_rows
from verl_digen.engine.transaction import TileWork
from verl_digen.schedulers.deal import Row, deal_rows, stand_ins
from verl_digen.schedulers.tiles import Tile, choose_shape, plan_tiles
from verl_digen.types import TrainingRows

logger = logging.getLogger(__name__)


class Planner:
    """See the module.

    Args:
        group: the data-parallel ranks.
        expert_of: sigmas [n] -> number of the network that runs each.
        rehearse: dry run of rows as in training, to measure memory.
    """

    def __init__(
        self,
        tsp: TspConfig,
        group: dist.ProcessGroup,
        expert_of: Callable[[Tensor], Tensor],
        rehearse: Callable[[TrainingRows], None],
    ):
        self.tsp, self.group, self.expert_of, self.rehearse = tsp, group, expert_of, rehearse
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._rows_that_fit: dict[torch.Size, int] = {}

    def deal(
        self, samples: Sequence[FragmentSample], advantages: Tensor, fetch: Fetch, *, whole_samples: bool
    ) -> TileWork:
        """This rank's part of these samples' rows, of which there is at least one; a padding row if it gets none.

        Args:
            advantages: [samples] fp32.
            whole_samples: all rows of a sample go to one rank, also with `digen.tsp.enable`.
        """
        rows = fragment_rows(samples)
        dealt = deal_rows(rows, self.num_ranks, whole_samples=whole_samples or not self.tsp.enable)
        needed = sorted({row.sample for row in (*dealt[self.rank], *stand_ins(dealt, self.rank).values())})
        described = [samples[number] for number in needed]
        own = fetch(described).with_outcomes(
            advantages[needed],
            torch.tensor([sample.reward for sample in described]),
            [torch.tensor(sample.old_log_probs) for sample in described] if described[0].old_log_probs else None,
        )
        places = {number: place for place, number in enumerate(needed)}
        return TileWork(own, places, self._tiles(dealt, own), num_rows=len(rows))

    def _tiles(self, dealt: Sequence[Sequence[Row]], own: Samples) -> list[Tile]:
        samples, steps = self.tsp.extents
        max_rows = 1 if samples and steps else self._measured_rows(own, expert=min(_experts(dealt)))
        return plan_tiles(dealt, self.rank, choose_shape(max_rows, samples=samples, steps=steps))

    def _measured_rows(self, samples: Samples, expert: int) -> int:
        """Rows per tile that fit into memory. Every rank has a row of `expert`, so all run the same network."""
        if get_device_name() == "cpu":
            return memory.CPU_ROWS
        shape = samples.columns["latents"][0].shape[1:]
        if shape not in self._rows_that_fit:

            def peak_bytes(num_rows: int) -> int:
                rows = self._rehearsal(samples, expert, num_rows)
                return memory.peak_of(lambda: self.rehearse(rows))

            fit = memory.rows_that_fit(peak_bytes, memory.limit_bytes())
            self._rows_that_fit[shape] = memory.agreed_least(fit, self.group)
            logger.info("tiles hold up to %d rows of latents %s", self._rows_that_fit[shape], list(shape))
        return self._rows_that_fit[shape]

    def _rehearsal(self, samples: Samples, expert: int, num_rows: int) -> TrainingRows:
        """`num_rows` copies of the row with the longest prompt for `expert`, masked out; for the memory probe."""

        def length(pick: tuple[int, int]) -> int:
            return sum(tensor.numel() for tensor in samples.conditions[pick[0]][0].values())

        candidates = [
            (sample, step)
            for sample, sigmas in enumerate(samples.columns["sigmas"])
            for step, own in enumerate(self.expert_of(sigmas).tolist())
            if own == expert
        ]
        sample, step = max(candidates, key=length)
        rows = make_rows(samples.pick([(sample, [step])] * num_rows))
        return replace(rows, mask=torch.zeros(num_rows))


def _experts(dealt: Sequence[Sequence[Row]]) -> set[int]:
    return {row.expert for hand in dealt for row in hand}
