# SPDX-License-Identifier: Apache-2.0
"""Steps that samples of a batch share: from one initial noise to the first stochastic step they are the same.

With `digen.sampling.shared_initial_noise` the samples of a group start alike, and before their window every step is
deterministic. So one forward serves all samples of the group that are in the batch (a lane), until its window begins.

Invariant (tests/sampling/test_prefix.py): a sample is that of a batch in which every row runs every step, up to the
float error of another batch size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from verl_digen.types import SampleRequest


@dataclass(frozen=True)
class Lanes:
    """Rows of a batch that run at one step."""

    rows: tuple[int, ...]
    """Rows that run, ascending: the first of each set of equal ones."""
    lane_of: tuple[int, ...]
    """Row -> position in `rows` of the one that is equal to it."""

    @property
    def is_whole(self) -> bool:
        """True if every row runs."""
        return len(self.rows) == len(self.lane_of)


class SharedPrefix:
    """Lanes of a batch, step by step.

    Args:
        requests: the batch. initial_seeds: seed of each one's initial noise.

    Example: three samples of a group with a window that begins at step 2
        prefix = SharedPrefix(requests, (5, 5, 5))
        prefix.lanes(1)       # Lanes(rows=(0,), lane_of=(0, 0, 0))
        prefix.lanes(2)       # Lanes(rows=(0, 1, 2), lane_of=(0, 1, 2))
        prefix.num_shared     # (0, 2, 2), when all steps have run
    """

    def __init__(self, requests: Sequence[SampleRequest], initial_seeds: Sequence[int]):
        ends = [min(request.window.sde_steps, default=request.sampling.num_steps) for request in requests]
        shares = requests[0].sampling.shared_initial_noise
        self._ends = [end if shares else 0 for end in ends]
        self._starts = [
            (seed, request.condition_key) if shares else None
            for seed, request in zip(initial_seeds, requests, strict=True)
        ]
        self._num_shared = [0] * len(requests)

    def lanes(self, step: int) -> Lanes:
        """Rows that run at `step`; call once per step, in order."""
        rows: list[int] = []
        lane_of: list[int] = []
        known: dict[Hashable, int] = {}
        for row, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            key: Hashable = start if step < end else row
            if key in known:
                self._num_shared[row] += 1
            else:
                known[key] = len(rows)
                rows.append(row)
            lane_of.append(known[key])
        return Lanes(tuple(rows), tuple(lane_of))

    @property
    def num_shared(self) -> tuple[int, ...]:
        """Row -> steps so far that another row's forward served."""
        return tuple(self._num_shared)
