# SPDX-License-Identifier: Apache-2.0
"""Clocks of other processes and hosts, brought onto the driver's.

- As in NTP (RFC 5905, section 8): the driver notes when it asked and when the answer came; between the two the other
  side read its clock. The answer with the shortest round trip tells most, the others are set aside.
- A known offset stays as long as the new answers allow it: clocks that already agree (one host, or hosts kept together
  by NTP) are left alone, and parts of one interval that are collected at different times keep touching.

*Invariants:* the estimate is within its stated error of the true offset whatever part of the round trip each way takes;
the stated error of a fresh estimate is half the shortest round trip; an offset that still fits does not move.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from verl_digen.observe.timeline.interval import Interval

NUM_SAMPLES = 8
"""Answers asked for; the shortest round trip of 8 is rarely one that met a queue. NTP's filter keeps 8 too."""


class UnixClock:
    """Unix seconds that never go back: the time of day when it was made, continued by the monotonic clock."""

    def __init__(self) -> None:
        self._base_s = time.time() - time.perf_counter()

    def __call__(self) -> float:
        return self._base_s + time.perf_counter()


class ClockSample(NamedTuple):
    """One question and its answer."""

    sent_s: float
    """Driver's clock, before asking."""
    remote_s: float
    """The other clock, read in between."""
    received_s: float
    """Driver's clock, when the answer was there."""


@dataclass(frozen=True)
class ClockOffset:
    """How far another clock is ahead of the driver's.

    Example:
        >>> offset = ClockOffset.estimate([(100.0, 105.25, 100.5), (200.0, 206.0, 202.0)])
        >>> offset.offset_s, offset.error_s  # from the first, whose round trip was 0.5 s
        (5.0, 0.25)
    """

    offset_s: float
    error_s: float
    """The true offset is within this of `offset_s`."""

    @classmethod
    def estimate(cls, samples: Sequence[tuple[float, float, float]]) -> ClockOffset:
        """From (sent, remote, received) triples; see `ClockSample`.

        Raises:
            ValueError: no sample, or an answer that came before its question.
        """
        if not samples:
            raise ValueError("a clock offset needs >= 1 sample, got 0")
        for sent_s, _, received_s in samples:
            if received_s < sent_s:
                raise ValueError(
                    f"an answer must not come before its question, got {received_s - sent_s:.6f} s; "
                    "read both with one clock that never goes back"
                )
        sent_s, remote_s, received_s = min(samples, key=lambda sample: sample[2] - sample[0])
        # from `sent_s`, so that the digits of unix seconds do not drown the microseconds
        half_s = (received_s - sent_s) / 2
        return cls(offset_s=(remote_s - sent_s) - half_s, error_s=half_s)

    def checked(self, samples: Sequence[tuple[float, float, float]]) -> ClockOffset:
        """This offset with the error the samples leave it; a fresh estimate if they rule it out."""
        fresh = ClockOffset.estimate(samples)
        distance_s = abs(fresh.offset_s - self.offset_s)
        if distance_s > fresh.error_s:
            return fresh
        return ClockOffset(self.offset_s, fresh.error_s + distance_s)

    def align(self, intervals: Iterable[Interval]) -> list[Interval]:
        """Intervals of the other clock, on the driver's."""
        if self.offset_s == 0:
            return list(intervals)
        return [
            replace(interval, start_s=interval.start_s - self.offset_s, end_s=interval.end_s - self.offset_s)
            for interval in intervals
        ]


SAME_CLOCK = ClockOffset(0.0, 0.0)
"""Where one starts: a clock is taken for the driver's until an answer rules that out."""


def sample_clock(
    read_remote: Callable[[], float], now_s: Callable[[], float], num_samples: int = NUM_SAMPLES
) -> list[ClockSample]:
    """Ask for the other clock `num_samples` times.

    Args:
        read_remote: asks and waits for the answer, e.g. `lambda: ray.get(worker.now_s.remote())`.
        now_s: the driver's clock, a `UnixClock`.
    """
    return [ClockSample(now_s(), read_remote(), now_s()) for _ in range(num_samples)]
