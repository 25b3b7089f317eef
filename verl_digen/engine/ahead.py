# SPDX-License-Identifier: Apache-2.0
"""Samples of the fragment that trains next, fetched while the last tile of this one runs.

    fetch.look("f3", own)      the last tile of f3 begins: a thread reads what is announced, repeatedly, and fetches it
    fetch.rest()               the tile has run: nothing is read any more
    fetch(samples)             the next fragment begins: its samples are there, on their way, or fetched now
    fetch.close()              the batch is closed

- What is announced after another fragment than this one is old, and not fetched.
- Ranks read the announcement `READS_PER_S` times per second, all together, while their last tile runs.
- The announced samples are dealt as if they trained: a rank fetches those whose rows it would have. If other samples
  train, nothing of what was fetched ahead is used, and its memory is freed; the call in flight goes on beside the new
  one.
- Bound: the rows of one training call of a rank, on the host, beside those of the call that runs.
- An error of a fetch ahead is logged: the samples are fetched again when they train.
- No collective, and nothing of the device: threads only read TransferQueue.

Invariants (tests/engine/test_ahead.py): gradients are bitwise those without it, whatever is announced; after `close` no
thread runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from verl_digen.engine.fragment import FragmentSample, Upcoming
from verl_digen.engine.rows import Fetch, Samples
from verl_digen.store.upcoming import announced

logger = logging.getLogger(__name__)

Own = Callable[[Sequence[FragmentSample]], Sequence[FragmentSample]]
"""Samples of a fragment -> those that this rank would fetch."""


READS_PER_S = 500
"""Most readings of the announcement per second, of all ranks: 0.1 s of a core (measured at 0.2 ms each)."""
LEAST_PAUSE_S = 0.05
"""Shortest time between two readings of a rank."""


class FetchAhead:
    """A `Fetch` that may have begun before it is called. For one logical batch.

    Args:
        fetch: fetches samples when they train.
        announced: the newest announcement; None before the first one.
        num_ranks: ranks that read it.
    """

    def __init__(self, fetch: Fetch, announced: Callable[[], Upcoming | None], num_ranks: int = 1):
        self.fetch, self._announced = fetch, announced
        self._pause_s = max(LEAST_PAUSE_S, num_ranks / READS_PER_S)
        self._ends_looking = threading.Event()
        self._found: Samples | None = None
        self._is_closed = False
        self._looking: threading.Thread | None = None
        self._dropped: list[Samples] = []
        """Samples that were not used; a call for them may be in flight."""
        self.num_ahead, self.num_unused = 0, 0
        """Samples that trained after they were asked for ahead, and samples asked for in vain."""

    def look(self, after: str, own: Own) -> None:
        """Begin to fetch what is announced after the fragment `after`. Once per fragment."""
        if self._looking is not None or self._is_closed:
            return
        self._ends_looking.clear()
        self._looking = threading.Thread(target=self._look, args=(after, own), name="digen-ahead", daemon=True)
        self._looking.start()

    def rest(self) -> None:
        """Read no further announcement: the last tile has run. What is fetched ahead goes on."""
        self._ends_looking.set()

    def __call__(self, samples: Sequence[FragmentSample]) -> Samples:
        """The samples, see `Fetch`."""
        started_s = time.perf_counter()
        found = self._take()
        if found is None or found.arrival is None:
            return self.fetch(samples)
        if [sample.key for sample in found.described] != [sample.key for sample in samples] or found.arrival.has_failed:
            self._drop(found)
            return self.fetch(samples)
        self.num_ahead += len(samples)
        found.arrival.waited_s = time.perf_counter() - started_s
        return replace(found, described=samples)

    def close(self) -> None:
        """Drop what was fetched ahead; returns when no thread runs."""
        self._is_closed = True
        found = self._take()
        if found is not None:
            self._drop(found)
        for samples in self._dropped:
            samples.close()
        self._dropped = []

    def _take(self) -> Samples | None:
        """Samples that are fetched ahead, once the thread that looks has ended; it waits for nothing but conditions."""
        if self._looking is not None:
            self._ends_looking.set()
            self._looking.join()
            self._looking = None
        found, self._found = self._found, None
        return found

    def _drop(self, samples: Samples) -> None:
        """Stop a fetch, and keep it until its call in flight has ended."""
        self.num_unused += len(samples.described)
        if samples.arrival is not None:
            samples.arrival.stop()
        self._dropped = [*(one for one in self._dropped if one.arrival and one.arrival.is_running), samples]

    def _look(self, after: str, own: Own) -> None:
        told: Upcoming | None = None
        while True:
            try:
                upcoming = self._announced()
                if upcoming is not None and upcoming.after == after and upcoming != told:
                    told = upcoming
                    self._begin(own(upcoming.samples))
            except Exception as error:  # of TransferQueue or its store; the samples are fetched again when they train
                logger.warning("nothing is fetched ahead of the fragment after %s: %s", after, error)
                return
            if self._ends_looking.wait(self._pause_s):
                return

    def _begin(self, samples: Sequence[FragmentSample]) -> None:
        """Fetch these samples ahead, in place of others."""
        older, self._found = self._found, None
        if older is not None:
            self._drop(older)
        if not samples:
            return
        found = self.fetch(samples)
        found.request([index] for index in range(len(samples)))
        self._found = found


def announced_fragment() -> Upcoming | None:
    """The newest announcement in TransferQueue."""
    packed = announced()
    return None if packed is None else Upcoming.unpacked(packed)
