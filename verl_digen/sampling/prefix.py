# SPDX-License-Identifier: Apache-2.0
"""Steps that samples of a group share: from one initial noise to the first stochastic step they are the same.

With `digen.sampling.shared_initial_noise` the samples of a group start alike, and before their window every step is
deterministic. Samples with a window wait for it in their batch, while one of their group runs these steps by itself
(`prefix_cache`). Samples without one that start alike run as one (a lane).

Invariants (tests/sampling/test_prefix.py): latents at a window's start are bitwise those of a sample that is generated
alone; a batch in which samples share these steps is bitwise the one in which each runs them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_digen.sampling.prefix_cache import Prefix, prefix_of
from verl_digen.types import SampleRequest


@dataclass(frozen=True)
class Lanes:
    """Rows of a batch that run at one step."""

    rows: tuple[int, ...]
    """Rows that run, ascending: the first of each set of equal ones."""
    lane_of: tuple[int | None, ...]
    """Row -> position in `rows` of the one that is equal to it; None for a row that waits for its window."""

    @property
    def is_whole(self) -> bool:
        """True if every row runs."""
        return len(self.rows) == len(self.lane_of)

    def place(self, made: Tensor, before: Tensor) -> Tensor:
        """[B, ...]: of `made` [R, ...] where a lane ran, of `before` [B, ...] in rows that wait.

        Args:
            made: one entry per row of `rows`.
        """
        if self.is_whole:
            return made
        sources = [len(made) + row if lane is None else lane for row, lane in enumerate(self.lane_of)]
        return torch.cat([made, before])[sources]


class SharedPrefix:
    """Lanes of a batch, step by step.

    Args:
        requests: the batch. initial_seeds: seed of each one's initial noise.

    Example: three samples of a group with a window that begins at step 2
        prefix = SharedPrefix(requests, (5, 5, 5))
        prefix.waiting        # {0: p, 1: p, 2: p}; row 0 runs p's steps, then
        prefix.count(1)       # for each row that gets the latents from it
        prefix.lanes(1)       # Lanes(rows=(), lane_of=(None, None, None))
        prefix.lanes(2)       # Lanes(rows=(0, 1, 2), lane_of=(0, 1, 2))
        prefix.num_shared     # (0, 2, 2)
    """

    def __init__(self, requests: Sequence[SampleRequest], initial_seeds: Sequence[int]):
        self._prefixes = [prefix_of(one, seed) for one, seed in zip(requests, initial_seeds, strict=True)]
        self.waiting: dict[int, Prefix] = {
            row: prefix
            for row, prefix in enumerate(self._prefixes)
            if prefix is not None and requests[row].window.sde_steps
        }
        """Row with a window that begins later -> the steps before it."""
        self._num_shared = [0] * len(requests)

    def count(self, row: int) -> None:
        """Note that a waiting row got the latents that another sample's forwards made."""
        self._num_shared[row] += self.waiting[row].num_steps

    def lanes(self, step: int) -> Lanes:
        """Rows that run at `step`; call once per step, in order."""
        rows: list[int] = []
        lane_of: list[int | None] = []
        known: dict[Hashable, int] = {}
        for row, prefix in enumerate(self._prefixes):
            is_shared = prefix is not None and step < prefix.num_steps
            if is_shared and row in self.waiting:
                lane_of.append(None)
                continue
            key: Hashable = prefix if is_shared else row
            if key in known:
                self._num_shared[row] += 1
            else:
                known[key] = len(rows)
                rows.append(row)
            lane_of.append(known[key])
        return Lanes(tuple(rows), tuple(lane_of))

    @property
    def num_shared(self) -> tuple[int, ...]:
        """Row -> steps so far that another sample's forward served."""
        return tuple(self._num_shared)
