# SPDX-License-Identifier: Apache-2.0
"""A fragment's work as a rank sees it: its own tiles with their samples, and all rows by numbers.

A joint column is made of numbers of rows on all ranks and in all tiles, before the tiles train.

Invariant (tests/engine/test_joint.py): the column does not depend on how rows are spread over tiles and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_digen.algorithms.objectives import JointRows
from verl_digen.engine.rows import Samples, row_advantages
from verl_digen.schedulers.deal import Row
from verl_digen.schedulers.tiles import Tile

Exchange = Callable[[Tensor], Tensor]
"""Sum of a tensor over the data-parallel ranks."""


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

    @property
    def num_rows(self) -> int:
        """Unmasked rows, over all ranks."""
        return len(self.all_rows.rows)

    def joint_columns(
        self, scalars: Sequence[Tensor], combine: Callable[[JointRows], Tensor], exchange: Exchange
    ) -> list[Tensor]:
        """The joint column of each of this rank's tiles, [N] fp32 each.

        Args:
            scalars: per tile one number for each row, [N] fp32.
            combine: makes the column of all rows.
        """
        index = {(row.sample, row.point): number for number, row in enumerate(self.all_rows.rows)}
        places = [torch.tensor([index[row.sample, row.point] for row in tile.rows]) for tile in self.tiles]
        found = torch.zeros(self.num_rows, device=scalars[0].device)
        for tile, place, values in zip(self.tiles, places, scalars, strict=True):
            if not tile.is_filler:  # its row is in another tile, too
                found[place.to(found.device)] = values
        column = combine(self.all_rows.joint(exchange(found)))
        return [column[place.to(column.device)] for place in places]
