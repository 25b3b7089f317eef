# SPDX-License-Identifier: Apache-2.0
"""A fragment's work as a rank sees it: its own tiles with their samples, and all rows by numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_digen.algorithms.objectives import JointRows
from verl_digen.engine.rows import Samples, row_advantages
from verl_digen.schedulers.deal import Row
from verl_digen.schedulers.tiles import Tile


@dataclass(frozen=True)
class AllRows:
    """All M rows of a fragment, the same on every rank."""

    rows: Sequence[Row]
    groups: Sequence[str]
    """uid of each sample, by `Row.sample`."""
    advantages: Tensor
    """[samples] fp32, or [samples, K] with a tree."""

    def joint(self, scalars: Tensor) -> JointRows:
        """The rows with one number each, `scalars` [M]; on its device."""
        numbers = {uid: number for number, uid in enumerate(dict.fromkeys(self.groups))}

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, device=scalars.device)

        samples, points = [row.sample for row in self.rows], [row.point for row in self.rows]
        return JointRows(
            scalars=scalars,
            samples=column(samples),
            groups=column([numbers[self.groups[sample]] for sample in samples]),
            points=column(points),
            advantages=row_advantages(self.advantages, samples, points).to(scalars.device),
        )


@dataclass(frozen=True)
class TileWork:
    """Tiles of this rank and the samples of their rows; every rank has the same number of tiles."""

    samples: Samples
    places: Mapping[int, int]
    """`Row.sample`, a sample's number in the plan -> its index in `samples`."""
    tiles: Sequence[Tile]
    all_rows: AllRows
    recomputed: Mapping[int, int]
    """`Row.bucket` -> blocks recomputed in backward."""

    def teacher_of(self, tile: Tile) -> str:
        """Name of the teacher of the tile's rows."""
        return self.samples.described[self.places[tile.rows[0].sample]].teacher

    @property
    def num_rows(self) -> int:
        """Unmasked rows, over all ranks."""
        return len(self.all_rows.rows)
