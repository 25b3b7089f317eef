# SPDX-License-Identifier: Apache-2.0
"""Circuit breaker of one URL: a server that keeps failing gets no request for a while, then a single one. Pure.

| state | requests | leaves when |
| --- | --- | --- |
| closed | all | `failures_to_open` failures in a row -> open |
| open | none | `cool_down_s` has passed and a request starts -> half open |
| half open | the one that started, the probe | it succeeds -> closed; it fails -> open |

A success closes it in any state: a request that started before it opened is proof of life, too. A probe that is
cancelled says nothing, and the next request is the probe.

Invariants (tests/reward/servers/test_breaker.py): open and half open admit at most one request per cool-down; it opens
after exactly `failures_to_open` failures in a row.

Example:
    breaker = Breaker(failures_to_open=2, cool_down_s=10)
    breaker.failed(0); breaker.failed(1)        # open
    breaker.admits_at(5)                        # 11
    breaker.start(11)                           # True: the probe
    breaker.admits_at(12)                       # inf
    breaker.succeeded()                         # closed
"""

from __future__ import annotations

from math import inf
from typing import Literal


class Breaker:
    """See the module. Times are seconds of any clock that does not run backwards."""

    def __init__(self, failures_to_open: int, cool_down_s: float):
        self._failures_to_open, self._cool_down_s = failures_to_open, cool_down_s
        self._num_failures = 0
        self._probe_at_s = -inf
        self.state: Literal["closed", "open", "half_open"] = "closed"
        self.num_openings = 0
        """Changes from closed to open."""

    def admits_at(self, now_s: float) -> float:
        """Earliest time that a request may start: `now_s`, a later one, or inf while the probe is in flight."""
        if self.state == "half_open":
            return inf
        return now_s if self.state == "closed" else max(now_s, self._probe_at_s)

    def start(self, now_s: float) -> bool:
        """Start a request -> True if it is the probe.

        Raises:
            RuntimeError: none is admitted now.
        """
        if self.admits_at(now_s) > now_s:
            raise RuntimeError(f"a {self.state} breaker admits no request before {self.admits_at(now_s)}, got {now_s}")
        if self.state == "closed":
            return False
        self.state = "half_open"
        return True

    def succeeded(self) -> None:
        """Note an answer."""
        self.state, self._num_failures = "closed", 0

    def failed(self, now_s: float) -> None:
        """Note a failure."""
        self._num_failures += 1
        if self.state == "half_open":
            self._open(now_s)
        elif self.state == "closed" and self._num_failures >= self._failures_to_open:
            self.num_openings += 1
            self._open(now_s)

    def cancelled(self, was_probe: bool) -> None:
        """Note that a request ended without an outcome."""
        if was_probe and self.state == "half_open":
            self.state, self._probe_at_s = "open", -inf

    def _open(self, now_s: float) -> None:
        self.state, self._probe_at_s = "open", now_s + self._cool_down_s
