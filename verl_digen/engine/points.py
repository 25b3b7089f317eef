# SPDX-License-Identifier: Apache-2.0
"""The two kinds of points: what one row of training is made of.

| points | recorded of a sample | a row |
| --- | --- | --- |
| `PathPoints` | transitions x -> x' of the SDE, with log-probs | one transition |
| `ForwardPoints` | clean latents x_0 and noise levels | x_0 noised again at one level |

Invariant (tests/engine/test_rows.py): a row depends on its sample and its point alone, not on rank, tile or order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from verl_digen.algorithms.forward import point_noise
from verl_digen.algorithms.objectives import Objective
from verl_digen.engine.fragment import FragmentSample
from verl_digen.types import CleanRecord, Noised, PathRecord, Transitions

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
    """The points that an objective trains."""
    if objective.points == "forward":
        return ForwardPoints(run_seed, shares_noise=objective.shares_noise)
    return PathPoints()
