# SPDX-License-Identifier: Apache-2.0
"""Steps that samples of a batch share: from one initial noise to the step whose noise is their own.

With `digen.sampling.shared_initial_noise` the samples of a group start alike. They stay alike until a step adds noise
that differs between them: the first one of their window, or in a tree (`digen.branches`) the step at which they split.
So at each step

- one forward serves all samples of the group in the batch that have the same latents (a lane), and
- one step is taken for all that also take the same noise (an edge). At a split a lane has several edges.

Samples of a group in other batches are not looked at: each batch runs what its own samples need.

Invariants (tests/sampling/test_prefix.py, test_tree.py): a sample is that of a batch in which every row runs every
step, up to the float error of another batch size; leaves of one subtree are bitwise equal up to their split.
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
    """Lanes and edges of a batch, step by step.

    Args:
        requests: the batch. initial_seeds: seed of each one's initial noise.

    Example: three samples of a group with a window that begins at step 2
        prefix = SharedPrefix(requests, (5, 5, 5))
        prefix.lanes(2)       # Lanes(rows=(0,), lane_of=(0, 0, 0))
        prefix.edges(2)       # Lanes(rows=(0, 1, 2), lane_of=(0, 1, 2))
        prefix.lanes(3)       # the same
        prefix.num_shared     # (0, 3, 3), when all steps have run
    """

    def __init__(self, requests: Sequence[SampleRequest], initial_seeds: Sequence[int]):
        self._requests = requests
        self._ends = [min(request.window.sde_steps, default=request.sampling.num_steps) for request in requests]
        shares = requests[0].sampling.shared_initial_noise
        self._starts = [
            (seed, request.condition_key) if shares else None
            for seed, request in zip(initial_seeds, requests, strict=True)
        ]
        self._num_shared = [0] * len(requests)

    def lanes(self, step: int) -> Lanes:
        """Rows whose forward runs at `step`; call once per step, in order."""
        lanes = self.edges(step - 1)
        for row, lane in enumerate(lanes.lane_of):
            self._num_shared[row] += lanes.rows[lane] != row
        return lanes

    def edges(self, step: int) -> Lanes:
        """Rows that take `step`, each for all that are equal to it afterwards; -1: those that start differently."""
        rows: list[int] = []
        lane_of: list[int] = []
        known: dict[Hashable, int] = {}
        for row in range(len(self._requests)):
            key = self._state(row, step)
            if key not in known:
                known[key] = len(rows)
                rows.append(row)
            lane_of.append(known[key])
        return Lanes(tuple(rows), tuple(lane_of))

    @property
    def num_shared(self) -> tuple[int, ...]:
        """Row -> steps so far that another row's forward served."""
        return tuple(self._num_shared)

    def _state(self, row: int, step: int) -> Hashable:
        """Name of the row's latents after `step`, the same for rows whose latents are equal."""
        start, request = self._starts[row], self._requests[row]
        if start is None:
            return row
        return start, None if step < self._ends[row] else request.noise_index(step)
