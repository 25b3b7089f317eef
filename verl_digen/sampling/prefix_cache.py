# SPDX-License-Identifier: Apache-2.0
"""Latents at the start of a group's window, kept for the samples of the group that come in later batches.

With `digen.sampling.shared_initial_noise` they are a function of `Prefix` and of the weights.

- Steps before a window run for one row at a time, on every back end: the rounding of matrix products depends on the
  batch size, and so the rest of a batch has no part in these latents.
- No memory of the solver is kept with them: the first step of a window is stochastic, and reads none.
- Processes that share the collectives of a forward keep the same entries, since they get the same calls.

Invariants (tests/sampling/test_prefix_cache.py): an entry is what running the steps gives, bitwise; none outlives the
weights it was made with.

Bound: `max_bytes` in all. The entry that was used least recently goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

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
    """See the module.

    Args:
        max_bytes: 0 keeps nothing, so that every sample runs every step.

    Example:
        cache.keep(prefix, 3, latents)
        cache.lookup(prefix, 3)      # latents
        cache.lookup(prefix, 4)      # None: made with other weights
        cache.clear()                # at every update: two may have the same version
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._max_bytes = max_bytes
        self._weights: Hashable = None
        """Weights that all entries were made with."""
        self._entries: OrderedDict[Prefix, Tensor] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return self._num_bytes

    def lookup(self, prefix: Prefix, weights: Hashable) -> Tensor | None:
        """Latents [...] after the steps of `prefix`, on the CPU in the dtype they were sampled in; None if not kept.

        Args:
            weights: identifies the weights among those since the last `clear`.
        """
        if weights != self._weights or prefix not in self._entries:
            return None
        self._entries.move_to_end(prefix)
        return self._entries[prefix]

    def keep(self, prefix: Prefix, weights: Hashable, latents: Tensor) -> None:
        """Keep latents [...] after the steps of `prefix`; entries of other weights are dropped."""
        if weights != self._weights:
            self.clear()
            self._weights = weights
        if latents.nbytes > self._max_bytes:
            return
        self._drop(prefix)
        self._entries[prefix] = latents.to("cpu", copy=True)
        self._num_bytes += latents.nbytes
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Drop all entries; call it when the weights change."""
        self._entries.clear()
        self._num_bytes = 0

    def _drop(self, prefix: Prefix) -> None:
        if prefix in self._entries:
            self._num_bytes -= self._entries.pop(prefix).nbytes
