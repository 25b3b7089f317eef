# SPDX-License-Identifier: Apache-2.0
"""Steps that samples of a group share: from one initial noise to the step whose noise is their own.

With `digen.sampling.shared_initial_noise` the samples of a group start alike, and before their window every step is
deterministic. Samples with a window wait for it in their batch, while one of their group runs these steps by itself
(`PrefixCache`). Samples without one that start alike run as one (a lane).

In a tree (`digen.branches`) samples share stochastic steps too. From the window on, one forward serves all samples of
the group in the batch that have the same latents (a lane), and one step is taken for all that also take the same noise
(an edge). At a split a lane has several edges. A step that a sample's solver passes over (`digen.sampling.outside`)
runs nothing for it.

Invariants (tests/sampling/test_prefix.py, test_tree.py): latents at a window's start equal, bit for bit, a sample
generated alone; without a tree, a batch in which samples share these steps is bitwise the one in which each runs
them; leaves of one subtree are bitwise equal up to their split.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from cachetools import LRUCache
from torch import Tensor

from verl_digen.algorithms.outside import step_ends
from verl_digen.types import SampleRequest, Sampling

MAX_BYTES = 256 * 2**20
"""Host memory for one process's entries: 256 pictures of 1024 px (Qwen-Image in fp32), or 13 videos of 81 frames in
720p (Wan2.1 in fp32); calculated."""


@dataclass(frozen=True)
class Prefix:
    """Steps before the window of a group, and all that they depend on beside the weights."""

    uid: str
    seed: int
    """Seed of the initial noise."""
    condition_key: str
    """`SampleRequest.condition_key`."""
    sampling: Sampling
    num_steps: int
    """Steps that samples of the group share: the window's first step, or all where there is no stochastic one."""


def prefix_of(request: SampleRequest, initial_seed: int) -> Prefix | None:
    """The steps that a sample shares with its group; None without shared initial noise, and where the window begins at
    step 0."""
    end = min(request.window.sde_steps, default=request.sampling.num_steps)
    if not request.sampling.shared_initial_noise or end == 0:
        return None
    return Prefix(request.uid, initial_seed, request.condition_key, request.sampling, end)


class PrefixCache:
    """Latents at the start of a group's window, kept for the samples of the group that come in later batches.

    - Steps before a window run for one row at a time, on every back end: the rounding of matrix products depends on the
      batch size, and so the rest of a batch has no part in these latents.
    - No memory of the solver is kept with them: the first step of a window is stochastic, and reads none.
    - Processes that share the collectives of a forward keep the same entries, since they get the same calls.

    Invariants (tests/sampling/test_prefix.py): an entry is what running the steps gives, bitwise; none outlives the
    weights it was made with. Bound: `max_bytes` in all, 0 keeps nothing; the entry that was used least recently goes
    first.

    Example:
        cache.keep(prefix, 3, latents)
        cache.lookup(prefix, 3)      # latents
        cache.lookup(prefix, 4)      # None: made with other weights
        cache.clear()                # at every update: two may have the same version
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._weights: Hashable = None
        """Weights that all entries were made with."""
        self._entries: LRUCache[Prefix, Tensor] = LRUCache(max_bytes, getsizeof=attrgetter("nbytes"))

    def lookup(self, prefix: Prefix, weights: Hashable) -> Tensor | None:
        """Latents [...] after the steps of `prefix`, on the CPU in the dtype they were sampled in; None if not kept
        with these weights, which are identified among those since the last `clear`."""
        return self._entries.get(prefix) if weights == self._weights else None

    def keep(self, prefix: Prefix, weights: Hashable, latents: Tensor) -> None:
        """Keep latents [...] after the steps of `prefix`; entries of other weights are dropped."""
        if weights != self._weights:
            self.clear()
            self._weights = weights
        if latents.nbytes <= self._entries.maxsize:
            self._entries[prefix] = latents.to("cpu", copy=True)

    def clear(self) -> None:
        """Drop all entries; call it when the weights change."""
        self._entries.clear()


@dataclass(frozen=True)
class Lanes:
    """Rows of a batch that run at one step."""

    rows: tuple[int, ...]
    """Rows that run, ascending: the first of each set of equal ones."""
    lane_of: tuple[int | None, ...]
    """Row -> position in `rows` of the one that is equal to it; None for a row that waits for its window, or passes
    over the step."""

    @property
    def is_whole(self) -> bool:
        """True if every row runs."""
        return len(self.rows) == len(self.lane_of)

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """For each row that runs, the rows that are equal to it, itself first."""
        members: list[list[int]] = [[] for _ in self.rows]
        for row, lane in enumerate(self.lane_of):
            if lane is not None:
                members[lane].append(row)
        return tuple(map(tuple, members))

    def place(self, made: Tensor, before: Tensor) -> Tensor:
        """[B, ...]: of `made` [R, ...], one entry per row of `rows`, where a lane ran, of `before` [B, ...] in rows
        that do not run."""
        if self.is_whole:
            return made
        sources = [len(made) + row if lane is None else lane for row, lane in enumerate(self.lane_of)]
        return torch.cat([made, before])[sources]


class SharedPrefix:
    """Lanes and edges of a batch, step by step.

    Example: three samples of a group with a window that begins at step 2
        prefix = SharedPrefix(requests, (5, 5, 5))    # seeds of their initial noise
        prefix.waiting        # {0: p, 1: p, 2: p}; row 0 runs p's steps, then
        prefix.count(1)       # for each row that gets the latents from it
        prefix.lanes(1)       # Lanes(rows=(), lane_of=(None, None, None))
        prefix.lanes(2)       # Lanes(rows=(0, 1, 2), lane_of=(0, 1, 2)); in a tree Lanes(rows=(0,), lane_of=(0, 0, 0))
        prefix.num_shared     # [0, 2, 2]; in a tree [0, 3, 3]
    """

    def __init__(self, requests: Sequence[SampleRequest], initial_seeds: Sequence[int]):
        self._requests = requests
        prefixes = [prefix_of(one, seed) for one, seed in zip(requests, initial_seeds, strict=True)]
        self.ends = [step_ends(one.sampling.outside, one.window.sde_steps, one.sampling.num_steps) for one in requests]
        """Row -> `step_ends`."""
        self._begins = [0 if prefix is None else prefix.num_steps for prefix in prefixes]
        """Row -> step before which the samples of its group that start alike are alike."""
        self._starts = [
            (one.uid, seed, one.condition_key) if one.sampling.shared_initial_noise else None
            for one, seed in zip(requests, initial_seeds, strict=True)
        ]
        self.waiting: dict[int, Prefix] = {
            row: prefix for row, prefix in enumerate(prefixes) if prefix is not None and requests[row].window.sde_steps
        }
        """Row with a window that begins later -> the steps before it."""
        self.num_shared = [0] * len(requests)
        """Row -> steps so far that another sample's forward served."""
        starts = [self.waiting[row].num_steps if row in self.waiting else 0 for row in range(len(requests))]
        self.num_skipped = [ends[start:].count(None) for ends, start in zip(self.ends, starts, strict=True)]
        """Row -> steps that it passes over from its window on, and others so far that it took without a forward."""

    def count(self, row: int) -> None:
        """Note that a waiting row got the latents that another sample's forwards made."""
        self.num_shared[row] += self.waiting[row].num_steps

    def lanes(self, step: int) -> Lanes:
        """Rows whose forward runs at `step`; call once per step, in order."""
        lanes = self._equal(step, step - 1)
        for row, lane in enumerate(lanes.lane_of):
            self.num_shared[row] += lane is not None and lanes.rows[lane] != row
        return lanes

    def edges(self, step: int) -> Lanes:
        """Rows that take `step`, each for all that are equal to it afterwards."""
        return self._equal(step, step)

    def _equal(self, step: int, after: int) -> Lanes:
        """Rows that run at `step`, of those with equal latents after step `after` the first."""
        rows: list[int] = []
        lane_of: list[int | None] = []
        known: dict[Hashable, int] = {}
        for row, begins in enumerate(self._begins):
            if (row in self.waiting and step < begins) or self.ends[row][step] is None:
                lane_of.append(None)
                continue
            key = self._state(row, after) if step < begins or self._requests[row].tree is not None else row
            if key not in known:
                known[key] = len(rows)
                rows.append(row)
            lane_of.append(known[key])
        return Lanes(tuple(rows), tuple(lane_of))

    def _state(self, row: int, step: int) -> Hashable:
        """Name of the row's latents after `step`, the same for rows whose latents are equal."""
        start = self._starts[row]
        if start is None:
            return row
        return start, None if step < self._begins[row] else self._requests[row].noise_index(step)
