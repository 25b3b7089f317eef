# SPDX-License-Identifier: Apache-2.0
"""Partition of rows over ranks and tiles: descriptions and samples -> this rank's `TileWork`.

- Every rank partitions all rows over the ranks by itself and fetches the samples of its own rows: conditions, by which
  tiles are planned, then columns, in the order of the tiles and in the background (`arrival`). Nothing is exchanged,
  except the number of tiles where lengths of texts are kept apart.
- Rows per tile and recomputed blocks under `auto` are chosen from measurements (`memory`,
  `verl_digen.schedulers.tiles`). All ranks measure together, with masked tiles, once per sampling and text length: the
  longest prompt of all ranks' rows, rounded up to `TEXT_STEP` tokens unless all are of one length. Later prompts are as
  long at most, or are measured too.

Invariant: all ranks make the same plan, so that all run the same number of tiles.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils.device import get_device_name

from verl_digen.engine import memory
from verl_digen.engine.fragment import FragmentSample, fragment_rows
from verl_digen.engine.loss import DiffusionLoss
from verl_digen.engine.memory import TileMemory
from verl_digen.engine.recompute import ALL
from verl_digen.engine.rows import Fetch, Picks, Points, Samples, TileWork, make_rows, text_order
from verl_digen.engine.transaction import GradientTransaction
from verl_digen.engine.verl_batches import VerlBatches
from verl_digen.platforms import device_memory
from verl_digen.sampling.sampler import TEXT_STEP
from verl_digen.schedulers.tiles import Row, Tile, TileChoice, choose_tile, deal_rows, plan_tiles, stand_ins
from verl_digen.types import Sampling, TrainingRows

logger = logging.getLogger(__name__)

Key = tuple[Sampling, int]
"""(sampling, tokens of the longest prompt on all ranks, rounded up) of rows that are measured together."""

SMALLEST_TILE = "set digen.tsp.samples_per_tile=1 digen.tsp.steps_per_tile=1, or a larger number that fits"
"""Remedy where a rehearsal of several rows does not fit."""


class Planner:
    """Plans of one engine, and the measurements that they need."""

    def __init__(self, engine: VerlBatches):
        self._engine, self.tsp, self.points, self.model = engine, engine.digen.tsp, engine.points, engine.model
        self.recomputation, self.base = engine.recomputation, engine.base
        self.rank, self.num_ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        self._measured: dict[Key, TileMemory] = {}
        self._logged: set[tuple[Key, TileChoice]] = set()

    def deal(self, samples: Sequence[FragmentSample], advantages: Tensor, fetch: Fetch) -> TileWork:
        """This rank's part of these samples' rows, of which there is at least one; a padding row if it gets none.
        Advantages are [samples] fp32, or [samples, K] with a tree. Samples still arrive: close them when the tiles have
        run, or failed."""
        rows = fragment_rows(samples)
        dealt = deal_rows(rows, self.num_ranks, whole_samples=not self.tsp.enable)
        mine = [*dealt[self.rank], *stand_ins(dealt, self.rank).values()]
        needed = sorted({row.sample for row in mine})
        own = replace(fetch([samples[number] for number in needed]), advantages=advantages[needed])
        places = {number: place for place, number in enumerate(needed)}
        try:
            tiles, recomputed = self._tiles(dealt, mine, own, places)
        except BaseException:
            own.close()
            raise
        own.request([places[row.sample] for row in tile.rows] for tile in tiles)
        groups = [sample.facts.uid for sample in samples]
        return TileWork(self.points, own, places, tiles, recomputed, rows, groups, advantages)

    def _tiles(
        self, dealt: Sequence[Sequence[Row]], mine: Sequence[Row], own: Samples, places: Mapping[int, int]
    ) -> tuple[Sequence[Tile], dict[int, int]]:
        """(this rank's tiles, bucket -> recomputed blocks). Each bucket has one choice of tiles, the same on all ranks,
        each of which has a row of every bucket in `mine`."""
        choices: dict[int, TileChoice] = {}
        for bucket in sorted({row.bucket for row in mine}):
            picks = [(places[row.sample], [row.point]) for row in mine if row.bucket == bucket]
            most = max(sum(row.bucket == bucket for row in hand) for hand in dealt)
            choices[bucket] = self._choice(own, picks, most)
        tiles = plan_tiles(
            dealt,
            self.rank,
            {bucket: choice.shape for bucket, choice in choices.items()},
            order=lambda row: text_order(self.model, own.condition(places[row.sample], row.point)),
            agreed_most=memory.most_of_ranks if self.model.keeps_lengths_apart else None,
        )
        return tiles, {bucket: choice.num_recomputed for bucket, choice in choices.items()}

    def _choice(self, samples: Samples, picks: Picks, num_rows: int) -> TileChoice:
        """Tiles for `num_rows` rows like the picked ones, of one bucket."""
        num_samples, num_steps = self.tsp.extents
        choose = partial(choose_tile, num_rows=num_rows, samples=num_samples, steps=num_steps)
        fixed = self.recomputation.fixed
        if get_device_name() == "cpu":
            self.base.decide_by_free_memory()
        if fixed is not None and (get_device_name() == "cpu" or (num_samples and num_steps and not self.base.asks)):
            return replace(choose(lambda unused: memory.CPU_ROWS, num_blocks=0), num_recomputed=fixed)
        key = self._key(samples, picks)
        if key not in self._measured:
            self._measured[key] = self.base.measured_without(lambda: self._measure(samples, picks, key, num_rows))
        found = self._measured[key]
        choice = self.base.choose(found, choose, num_rows)
        choice = choice if fixed is None else replace(choice, num_recomputed=fixed)
        if (key, choice) not in self._logged:
            self._logged.add((key, choice))
            logger.info(
                "%s with prompts of up to %d tokens: tiles of %s, %s of %d blocks recomputed",
                *(key[0].geometry, key[1], choice.shape, choice.num_recomputed, found.num_blocks),
            )
        return choice

    def _key(self, samples: Samples, picks: Picks) -> Key:
        """Values by which memory of these rows is measured. Collective."""
        longest = max(_text_tokens(samples, pick) for pick in picks)
        index, (point, *_) = picks[0]
        sample = samples.described[index]
        step = TEXT_STEP if self.model.spec.condition.num_tokens is None else 1
        return sample.generated_with(point).sampling, -(-memory.most_of_ranks(longest) // step) * step

    def _measure(self, samples: Samples, picks: Picks, key: Key, num_rows: int) -> TileMemory:
        longest = max(picks, key=lambda pick: _text_tokens(samples, pick))
        return memory.measure_tiles(
            lambda count: self._peak_bytes(_rehearsal(self.points, samples, longest, count, key[1])),
            device_memory.limit_bytes(),
            num_rows=num_rows,
            kept_bytes=device_memory.allocated_bytes,
            later_bytes=memory.state_to_come(self._engine.optimizer),
            blocks=self.recomputation if self.recomputation.fixed is None else None,
            most=memory.agreed_most,
        )

    def _peak_bytes(self, rows: TrainingRows) -> int:
        """Peak memory of a dry run of `rows`; as if each row took the device if it ran out of memory with more than the
        smallest tile (one row, all blocks recomputed), on the only rank."""
        try:
            return device_memory.peak_of(lambda: self.rehearse(rows))
        except torch.OutOfMemoryError:
            keeps_blocks = self.recomputation.fixed is None and self.recomputation.num_blocks < ALL
            is_smallest = len(rows) == 1 and not keeps_blocks
            if is_smallest or dist.get_world_size(dist.group.WORLD) > 1:
                of_row = partial(memory.smaller_row, self.recomputation, self.tsp.reduce)
                remedy = of_row if len(rows) == 1 else lambda: SMALLEST_TILE
                with memory.shortage_explained("a rehearsed tile", len(rows), remedy):
                    raise
            return len(rows) * device_memory.limit_bytes()

    def rehearse(self, rows: TrainingRows) -> None:
        """Run one tile (forward, and backward if the engine trains) as in training, to measure memory, and discard the
        gradient. Rows are on the CPU."""
        engine, rows = self._engine, rows.to(self._engine.forward.device)
        if engine.engine_config.forward_only:
            with torch.no_grad():
                engine.forward(rows)
        else:
            with torch.enable_grad():
                GradientTransaction(engine, DiffusionLoss(engine.digen), num_rows=1).rehearse(rows)


def _text_tokens(samples: Samples, pick: tuple[int, Sequence[int]]) -> int:
    """Tokens of the picked row's prompt, or of its negative one if that is longer: both are padded to one length."""
    index, (point, *_) = pick
    return max(len(condition["embeds"]) for condition in samples.condition(index, point) if condition is not None)


def _rehearsal(
    points: Points, samples: Samples, pick: tuple[int, Sequence[int]], num_rows: int, num_tokens: int
) -> TrainingRows:
    """`num_rows` copies of the picked row, masked out, with prompts of `num_tokens`: objects of their own, because rows
    that share one may take less."""
    rows = make_rows(points, samples, [pick] * num_rows)
    embeds = rows.conditions[0]["embeds"]
    padded = embeds.new_zeros(num_tokens, *embeds.shape[1:])
    padded[: len(embeds)] = embeds
    return replace(
        rows,
        conditions=[{**condition, "embeds": padded} for condition in rows.conditions],
        negative_conditions=rows.negative_conditions and [{**condition} for condition in rows.negative_conditions],
        mask=torch.zeros(num_rows),
    )
