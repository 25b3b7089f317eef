# SPDX-License-Identifier: Apache-2.0
"""Records of samples -> the rows of a tile, one (sample, point) pair each, and a fragment's work as a rank sees it.

| points | recorded of a sample | a row |
| --- | --- | --- |
| `PathPoints` | transitions x -> x' of the SDE, with log-probs | one transition |
| `ForwardPoints` | clean latents x_0 and noise levels | x_0 noised again at one level |

Invariants (tests/engine/test_rows.py): the rows of all tiles of a plan are the rows of the samples, each once; a row
depends on its sample and its point alone; a filler (padding) tile repeats an existing row, with mask 0.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from verl_digen.algorithms.forward import point_noise
from verl_digen.algorithms.objectives import JointRows, Objective
from verl_digen.engine.arrival import Arrival
from verl_digen.engine.fragment import FragmentSample
from verl_digen.models.base import DiffusionModel
from verl_digen.schedulers.tiles import Row, Tile
from verl_digen.store.client import fetch_columns
from verl_digen.store.conditions import ConditionPair, fetch_conditions
from verl_digen.types import CleanRecord, Noised, PathRecord, TrainingRows, Transitions

Picks = Sequence[tuple[int, Sequence[int]]]
"""(index of a sample, numbers of its points), in the order of the rows."""


class Points(Protocol):
    """One kind of points: the columns of a sample that it needs, and how a row is made of them."""

    columns: tuple[str, ...]
    """Columns that are fetched of each sample."""

    def make(
        self, samples: Sequence[FragmentSample], columns: Mapping[str, Sequence[Tensor]], picks: Picks
    ) -> tuple[Tensor, Tensor, Transitions | Noised]:
        """(latents [N, ...] that the network reads, sigmas [N], the rest) of the picked rows, on the CPU."""
        ...


class PathPoints:
    """Recorded transitions."""

    columns: tuple[str, ...] = PathRecord.COLUMNS

    def make(
        self, samples: Sequence[FragmentSample], columns: Mapping[str, Sequence[Tensor]], picks: Picks
    ) -> tuple[Tensor, Tensor, Transitions]:
        """The picked transitions, with the log-probs before the update where the driver sent them."""
        chosen = [(index, torch.tensor(points, dtype=torch.int64)) for index, points in picks]

        def gather(name: str) -> Tensor:
            return torch.cat([columns[name][index][points] for index, points in chosen])

        starts = [(index, columns["positions"][index][points]) for index, points in chosen]
        has_old = any(sample.old_log_probs for sample in samples)
        old = [samples[index].old_log_probs[point] for index, points in picks for point in points] if has_old else []
        transitions = Transitions(
            next_latents=torch.cat([columns["latents"][index][start + 1] for index, start in starts]),
            next_sigmas=gather("next_sigmas"),
            sigma_max=torch.stack(
                [columns["sigma_max"][index][samples[index].turn_of(point)] for index, own in picks for point in own]
            ),
            log_probs=gather("log_probs"),
            old_log_probs=torch.tensor(old) if old else None,
        )
        return (torch.cat([columns["latents"][index][start] for index, start in starts]), gather("sigmas"), transitions)


class ForwardPoints:
    """Clean latents, noised again; with `shares_noise` the samples of a group have the same noise."""

    columns: tuple[str, ...] = CleanRecord.COLUMNS

    def __init__(self, run_seed: int, *, shares_noise: bool = False):
        self.run_seed, self.shares_noise = run_seed, shares_noise

    def make(
        self, samples: Sequence[FragmentSample], columns: Mapping[str, Sequence[Tensor]], picks: Picks
    ) -> tuple[Tensor, Tensor, Noised]:
        """x = (1 - sigma) x_0 + sigma noise, in fp32; the noise belongs to the sample, or group, and the point."""
        clean, noise, sigmas = [], [], []
        for index, points in picks:
            sample = samples[index]
            ends = columns["clean"][index].float().chunk(max(1, len(sample.turns)))
            source = 0 if self.shares_noise else sample.facts.sample_index
            for point in points:
                end = ends[sample.turn_of(point)]
                clean.append(end)
                noise.append(point_noise(self.run_seed, sample.facts.uid, source, point, end.shape))
                sigmas.append(columns["sigmas"][index][point])
        made = Noised(torch.stack(clean), torch.stack(noise))
        level = torch.stack(sigmas)
        scale = level.reshape(-1, *(1,) * (made.clean.dim() - 1))
        return (1 - scale) * made.clean + scale * made.noise, level, made


def points_of(objective: Objective, run_seed: int) -> Points:
    if objective.points == "forward":
        return ForwardPoints(run_seed, shares_noise=objective.shares_noise)
    return PathPoints()


@dataclass(frozen=True)
class Samples:
    """B samples that a rank trains in one call; their numbers of points K may differ."""

    described: Sequence[FragmentSample]
    columns: Mapping[str, Sequence[Tensor]]
    """`Points.columns`, each sample's tensor without a batch dimension."""
    conditions: Mapping[str, ConditionPair]
    """By condition key, of each prompt and turn; samples of one prompt share the object."""
    advantages: Tensor
    """[B] fp32, or [B, K] with a tree, where each point has its own; 0 if the caller only wants log-probs."""
    arrival: Arrival | None = None
    """Fetch of the columns in the background; None: they are all there."""

    def request(self, tiles: Iterable[Sequence[int]]) -> None:
        """Say in which order tiles need these samples, by index."""
        if self.arrival is not None:
            self.arrival.request(tiles)

    def close(self) -> None:
        """Fetch nothing further; no thread of this fetch runs afterwards."""
        if self.arrival is not None:
            self.arrival.close()

    @property
    def waited_s(self) -> float:
        """Seconds that this rank waited for these samples."""
        return 0.0 if self.arrival is None else self.arrival.waited_s

    def condition(self, index: int, point: int) -> ConditionPair:
        """Conditions of a sample at one of its points."""
        return self.conditions[self.described[index].generated_with(point).condition_key]


AT_ONCE = 8
"""Samples that are fetched by one call. More are fetched tile by tile."""

Fetch = Callable[[Sequence[FragmentSample]], Samples]
"""Loads the tensors of samples, in order. Each rank calls it for the samples whose rows it has."""


def fetch_samples(points: Points, partition: str, samples: Sequence[FragmentSample]) -> Samples:
    """The samples from TransferQueue's `partition`: the conditions of their prompts, by which tiles are planned, and
    columns that arrive in the background, see `verl_digen.engine.arrival`. `close` the result when it is used.

    Columns of few samples are requested at once, beside the conditions; of more, in the order of `Samples.request`.
    """
    keys = [sample.key for sample in samples]
    arrival = Arrival(keys, points.columns, partial(fetch_columns, partition, names=points.columns))
    if len(samples) <= AT_ONCE:
        arrival.request([range(len(samples))])
    started_s = time.perf_counter()
    try:
        conditions = fetch_conditions(
            [part.condition_key for sample in samples for part in sample.turns or (sample.facts,)]
        )
    except BaseException:
        arrival.close()
        raise
    arrival.waited_s += time.perf_counter() - started_s
    return Samples(samples, arrival.columns, conditions, advantages=torch.zeros(len(samples)), arrival=arrival)


def row_advantages(advantages: Tensor, samples: Sequence[int], points: Sequence[int]) -> Tensor:
    """Advantages [N] of N rows, by their samples and points. `advantages`: [B], or [B, K] where each point has its
    own."""
    return advantages[samples] if advantages.dim() == 1 else advantages[samples, points]


def make_rows(points: Points, samples: Samples, picks: Picks) -> TrainingRows:
    """The N picked rows, in order. They must have one sampling.

    Example: two samples with trained steps at positions [0, 1] and [1] of their latents, and all their points
        # latents      = a0, a1, b1
        # next_latents = a1, a2, b2
    """
    latents, sigmas, point = points.make(samples.described, samples.columns, picks)
    rows = [index for index, chosen in picks for _ in chosen]
    numbers = [point for _, chosen in picks for point in chosen]
    described = [samples.described[index] for index in rows]
    samplings = {one.generated_with(number).sampling for one, number in zip(described, numbers, strict=True)}
    pairs = [samples.condition(index, number) for index, number in zip(rows, numbers, strict=True)]
    negatives = [negative for _, negative in pairs if negative is not None]
    if len(samplings) != 1 or (negatives and len(negatives) != len(rows)):
        raise RuntimeError(
            f"rows of one tile must have one sampling, and all or none of them negative conditions, got {samplings} "
            f"and {len(negatives)} negative conditions of {len(rows)} rows"
        )
    return TrainingRows(
        latents=latents,
        sigmas=sigmas,
        point=point,
        conditions=[positive for positive, _ in pairs],
        negative_conditions=negatives or None,
        advantages=row_advantages(samples.advantages, rows, numbers),
        mask=torch.ones(len(rows)),
        sampling=samplings.pop(),
        rewards=torch.tensor([one.reward for one in described]),
    )


def text_order(model: DiffusionModel, pair: ConditionPair) -> tuple[int, ...]:
    """Lengths of a sample's texts, the longest first, then each; () where all are of one length for the network.

    Example: a prompt of 40 tokens and a negative prompt of 5
        text_order(model, pair)  # (40, 40, 5)
    """
    lengths = [length for condition in pair if condition is not None for length in model.text_lengths(condition)]
    return (max(lengths), *lengths) if lengths else ()


def padded_tokens(model: DiffusionModel, rows: TrainingRows) -> tuple[int, int]:
    """(text tokens that a forward of the rows reads, padding among them); negative prompts are included.

    Example: prompts of 40 and 30 tokens without guidance
        padded_tokens(model, rows)  # (80, 10)
    """
    branches = [list(rows.conditions)]
    if rows.sampling.is_guided and rows.negative_conditions is not None:
        branches.append(list(rows.negative_conditions))
    if not model.keeps_lengths_apart:  # both branches in one forward
        branches = [[condition for branch in branches for condition in branch]]
    total = padding = 0
    for branch in branches:
        for lengths in zip(*(model.text_lengths(condition) for condition in branch), strict=True):
            total += max(lengths) * len(lengths)
            padding += max(lengths) * len(lengths) - sum(lengths)
    return total, padding


Exchange = Callable[[Tensor], Tensor]
"""Sum of a tensor over the data-parallel ranks."""


@dataclass(frozen=True)
class TileWork:
    """Tiles of this rank and the samples of their rows; every rank has the same number of tiles."""

    points: Points
    samples: Samples
    places: Mapping[int, int]
    """`Row.sample`, a sample's number in the plan -> its index in `samples`."""
    tiles: Sequence[Tile]
    recomputed: Mapping[int, int]
    """`Row.bucket` -> blocks recomputed in backward."""
    rows: Sequence[Row]
    """All M rows of the samples, over all ranks and the same on each; none is masked."""
    groups: Sequence[str]
    """uid of each sample, by `Row.sample`."""
    advantages: Tensor
    """[samples] fp32, or [samples, K] with a tree."""

    def rows_of(self, tile: Tile) -> TrainingRows:
        """The rows of one of the tiles, on the CPU."""
        by_sample = groupby(tile.rows, lambda row: row.sample)
        picks = [(self.places[sample], [row.point for row in rows]) for sample, rows in by_sample]
        rows = make_rows(self.points, self.samples, picks)
        return replace(rows, mask=torch.zeros(len(rows))) if tile.is_filler else rows

    def joint_columns(
        self, scalars: Sequence[Tensor], combine: Callable[[JointRows], Tensor], exchange: Exchange
    ) -> list[Tensor]:
        """The joint column of each of this rank's tiles, [N] fp32 each, which `combine` makes of one number for each
        row on all ranks and in all tiles, before the tiles train; `scalars`: per tile its rows' numbers, [N] fp32.

        Invariant (tests/engine/test_rows.py): the column does not depend on how rows are spread over tiles and ranks.
        """
        index = {(row.sample, row.point): number for number, row in enumerate(self.rows)}
        places = [torch.tensor([index[row.sample, row.point] for row in tile.rows]) for tile in self.tiles]
        found = torch.zeros(len(self.rows), device=scalars[0].device)
        for tile, place, values in zip(self.tiles, places, scalars, strict=True):
            if not tile.is_filler:  # its row is in another tile, too
                found[place.to(found.device)] = values
        column = combine(self._joint(exchange(found)))
        return [column[place.to(column.device)] for place in places]

    def _joint(self, scalars: Tensor) -> JointRows:
        """The rows with one number each, `scalars` [M]; on its device."""
        numbers = {uid: number for number, uid in enumerate(dict.fromkeys(self.groups))}
        samples, points = [row.sample for row in self.rows], [row.point for row in self.rows]

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, device=scalars.device)

        return JointRows(
            scalars=scalars,
            samples=column(samples),
            groups=column([numbers[self.groups[sample]] for sample in samples]),
            points=column(points),
            advantages=row_advantages(self.advantages, samples, points).to(scalars.device),
        )
