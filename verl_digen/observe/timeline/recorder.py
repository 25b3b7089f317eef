# SPDX-License-Identifier: Apache-2.0
"""Record what the lanes of one process do, in microseconds each, until the driver collects it.

- Bounded: a recorder that is never drained drops new intervals and counts them; the time shows as unattributed.
- An interval that is open at a drain is cut there: the part so far is handed over, the rest follows. So a step's
  accounts are complete at its end, though work for the next step is in flight.
- Threads and coroutines may share one.

*Invariants:* every moment of an interval is handed over exactly once, however often it is drained; at most `CAPACITY`
intervals are held, and lost ones are counted; an exception passes, and its interval is noted with `failed`.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from verl_digen.observe.timeline.interval import Interval, Kind, Lane

logger = logging.getLogger(__name__)

CAPACITY = 65_536
"""Intervals held between two drains, about 30 MB; a step of 1,000 devices makes some thousands."""


@dataclass(eq=False)
class OpenInterval:
    """An interval that has begun. Made by `Recorder.begin`."""

    begun: Interval
    """From its start, 0 s long."""
    detail: dict[str, str | int | float | bool] = field(default_factory=dict)
    """May be filled until the end."""

    def until(self, end_s: float, *, is_cut: bool) -> Interval:
        """The interval, at least 0 s long, to `end_s`."""
        end_s = max(end_s, self.begun.start_s)
        return replace(self.begun, end_s=end_s, is_cut=is_cut, detail=dict(self.detail))


class Recorder:
    """Example:

    >>> recorder, lane = Recorder(), Lane("trainer", 0, host="node-0", num_devices=8)
    >>> with recorder.interval("train", lane, step=3, fragment_id="f0", num_samples=24) as detail:
    ...     detail["num_tiles"] = 9
    >>> waiting = recorder.begin("wait", lane, step=3, reason="no_fragment_ready")  # ends in another callback
    >>> len(recorder.drain())  # the training, and the waiting so far
    2
    >>> recorder.end(waiting)
    >>> len(recorder.drain())  # the rest of the waiting
    1
    """

    def __init__(self, *, now_s: Callable[[], float] | None = None):
        self.now_s: Callable[[], float] = unix_clock() if now_s is None else now_s
        """The clock of this recorder's intervals; the driver compares it with its own."""
        self._lock = threading.Lock()
        self._noted: list[Interval] = []
        self._open: dict[int, OpenInterval] = {}
        self._num_lost = 0

    def begin(self, kind: Kind, lane: Lane, *, step: int, **work: Any) -> OpenInterval:
        """Open an interval now; close it with `end`. `work`: further fields of `Interval`."""
        now_s = self.now_s()
        opened = OpenInterval(Interval(kind, lane, step, now_s, now_s, **work))
        with self._lock:
            self._open[id(opened)] = opened
        return opened

    def end(self, opened: OpenInterval) -> None:
        """Close an interval now. Raises RuntimeError if it has ended already."""
        with self._lock:
            if self._open.pop(id(opened), None) is None:
                raise RuntimeError(f"{opened.begun.name} has ended already")
            self._note(opened.until(self.now_s(), is_cut=False))

    @contextmanager
    def interval(
        self, kind: Kind, lane: Lane, *, step: int, **work: Any
    ) -> Iterator[dict[str, str | int | float | bool]]:
        """Record the body as an interval, see `begin`; yields the `detail` to fill."""
        opened = self.begin(kind, lane, step=step, **work)
        try:
            yield opened.detail
        except BaseException as error:
            opened.detail["failed"] = type(error).__name__
            raise
        finally:
            self.end(opened)

    def drain(self) -> list[Interval]:
        """Hand over all intervals, of open ones the part so far; warns of those lost since the last drain."""
        with self._lock:
            now_s = self.now_s()
            for opened in self._open.values():
                if now_s > opened.begun.start_s:
                    self._note(opened.until(now_s, is_cut=True))
                    opened.begun = replace(opened.begun, start_s=now_s, end_s=now_s)
            drained, num_lost = self._noted, self._num_lost
            self._noted, self._num_lost = [], 0
        if num_lost:
            logger.warning(
                "the timeline lost %d intervals, which show as unattributed time: a recorder holds %d; drain it "
                "more often",
                num_lost,
                CAPACITY,
            )
        return drained

    def _note(self, interval: Interval) -> None:
        if len(self._noted) < CAPACITY:
            self._noted.append(interval)
        else:
            self._num_lost += 1


def unix_clock() -> Callable[[], float]:
    """Clock of unix seconds that never go back: the time of day now, continued by the monotonic clock."""
    base_s = time.time() - time.perf_counter()
    return lambda: base_s + time.perf_counter()
