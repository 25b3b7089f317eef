# SPDX-License-Identifier: Apache-2.0
"""Samples of a `diffusers` replica that fit into its device's memory together: `digen.rollout.max_batch_size=auto`.

Batches of one kind (sampling, text length) take memory that grows linearly with their samples. The first sample of a
kind runs alone, and the next two together if at most all that the first took comes again; the peaks of both give what a
sample takes, and what a batch takes beside its samples. A batch then has as many samples as fit into what is free when
it starts, less a margin and the buckets of a weight update, which may come while it runs. The others of its requests
run after it.

A batch that runs out of memory runs again in halves: noise is a function of the sample, so the samples are the same. No
later batch of its kind has more. On a CPU memory does not limit a batch: nothing is measured.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from verl_digen.config.rollout import MOST_AUTO
from verl_digen.platforms import device_memory
from verl_digen.platforms.device_memory import MARGIN

logger = logging.getLogger(__name__)

Made = TypeVar("Made")


@dataclass
class _Kind:
    """Measurements of one kind of batches, in bytes."""

    one: int
    """Memory that one sample took beyond what was allocated before; of it some may stay (workspaces)."""
    peak: int
    """Peak with one sample."""
    sample: int
    """Memory that each further sample takes; `one` until two have run."""
    most: int = MOST_AUTO
    """Samples of the largest batch that may run: less than one that ran out of memory."""
    has_two: bool = False
    """True once two have run together."""

    def fitting(self, room: int) -> int:
        """Samples whose batch takes at most `room`; at least one."""
        return max(1, min(self.most, 1 + (room - self.one) // max(self.sample, 1)))


class Fitting:
    """Cuts batches into parts that fit; where nothing `measures`, as on a CPU, a batch is made as it is."""

    reserved_bytes = 0
    """Memory of the device that other processes take for a time."""

    def __init__(self, measures: bool, device: torch.device):
        self._measures = measures and device.type != "cpu"
        self._kinds: dict[Hashable, _Kind] = {}
        self.size: int | None = None
        """Samples that fitted together at the last batch; None before the first one, or where nothing is measured."""

    def make(self, kind: Hashable, places: Sequence[int], make: Callable[[Sequence[int]], Made]) -> list[Made]:
        """Call `make` with parts of `places`, in order; returns the results. Batches of one `kind` take the same memory
        per sample. torch.OutOfMemoryError if one sample alone does not fit."""
        if not self._measures:
            return [make(places)]
        made: list[Made] = []
        left = list(places)
        while left:
            size = min(len(left), self._next_size(kind))
            shortage = ""
            try:
                made.append(self._measured(kind, left[:size], make))
            except torch.OutOfMemoryError as error:
                if size == 1:
                    raise
                shortage = str(error).splitlines()[0]
            if shortage:  # handled here, when the error holds no tensors of the batch any more
                self._halve(kind, size, shortage)
            else:
                left = left[size:]
        return made

    def _next_size(self, kind: Hashable) -> int:
        """Samples of the kind's next batch: one that has not run is measured with one, then with two."""
        found = self._kinds.get(kind)
        if found is None:
            return 1
        taken = device_memory.allocated_bytes() + self.reserved_bytes
        size = found.fitting(int(device_memory.limit_bytes() * (1 - MARGIN)) - taken)
        self.size = size
        return size if found.has_two else min(2, size)

    def _measured(self, kind: Hashable, part: Sequence[int], make: Callable[[Sequence[int]], Made]) -> Made:
        """Make a part; measure it where one or two samples of its kind have not run."""
        found = self._kinds.get(kind)
        if found is not None and (found.has_two or len(part) != 2):
            return make(part)
        results: list[Made] = []
        kept = device_memory.allocated_bytes()
        peak = device_memory.peak_of(lambda: results.append(make(part)))
        taken = peak - kept
        if found is None:
            self._kinds[kind] = _Kind(one=taken, peak=peak, sample=taken)
        else:  # the difference of the peaks holds where some of `one` stayed, the other one where some was freed
            found.sample, found.has_two = max(peak - found.peak, taken - found.one, 1), True
            logger.info(
                "a batch takes %.2f GB for one sample and %.2f GB for each further one, beside %.1f of %.1f GB",
                *(size / 1e9 for size in (found.one, found.sample, kept, device_memory.limit_bytes())),
            )
        return results[0]

    def _halve(self, kind: Hashable, size: int, shortage: str) -> None:
        """Allow half of a batch that ran out of memory."""
        self._kinds[kind].most = size // 2
        device_memory.release_cached()
        logger.warning(
            "a batch of %d samples ran out of memory (%s); they run again, at most %d together, as all later ones",
            size,
            shortage,
            size // 2,
        )
