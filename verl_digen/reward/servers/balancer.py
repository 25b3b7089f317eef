# SPDX-License-Identifier: Apache-2.0
"""Choice of a URL for the next request: the least busy one that may have it. Pure: times come in.

- A URL is free if it has fewer than `max_concurrency` requests in flight, its breaker is closed or admits a probe, and
  it asked for no pause (Retry-After).
- Of free URLs the one with the fewest requests in flight, then the fewest in all, then the first. One that has just
  failed the same request comes last.

Invariants (tests/reward/servers/test_balancer.py): never more than `max_concurrency` requests in flight per URL; a URL
whose breaker is open gets none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from verl_digen.reward.servers.breaker import Breaker


@dataclass(eq=False)
class Endpoint:
    """State of one URL."""

    url: str
    breaker: Breaker
    num_in_flight: int = 0
    num_started: int = 0
    paused_until_s: float = -inf


@dataclass(frozen=True)
class Started:
    """A request that is in flight."""

    endpoint: Endpoint
    is_probe: bool


class Balancer:
    """See the module. Every `Started` is given back to exactly one of `succeeded`, `failed`, `paused`, `cancelled`."""

    def __init__(self, urls: Sequence[str], *, max_concurrency: int, failures_to_open: int, cool_down_s: float):
        self._max_concurrency = max_concurrency
        self.endpoints = tuple(Endpoint(url, Breaker(failures_to_open, cool_down_s)) for url in urls)

    def start(self, now_s: float, *, avoid: str | None = None, only: str | None = None) -> Started | float:
        """Start a request on the best URL -> it, or the time in s until one may be free.

        The time is inf where only an outcome of a request in flight can free one.

        Args:
            avoid: URL that has just failed the request.
            only: URL that the request must go to.
        """
        allowed = [endpoint for endpoint in self.endpoints if only in (None, endpoint.url)]
        if not allowed:
            raise RuntimeError(f"a request must go to one of {[one.url for one in self.endpoints]}, got {only!r}")
        free = [endpoint for endpoint in allowed if self._free_at(endpoint, now_s) <= now_s]
        if not free:
            return min(self._free_at(endpoint, now_s) for endpoint in allowed) - now_s
        best = min(free, key=lambda one: (one.url == avoid, one.num_in_flight, one.num_started))
        best.num_in_flight += 1
        best.num_started += 1
        return Started(best, best.breaker.start(now_s))

    def succeeded(self, started: Started) -> None:
        """Note that the server answered, be it with a refusal."""
        started.endpoint.num_in_flight -= 1
        started.endpoint.breaker.succeeded()

    def failed(self, started: Started, now_s: float) -> bool:
        """Note a failure -> True if the breaker opened."""
        endpoint = started.endpoint
        endpoint.num_in_flight -= 1
        before = endpoint.breaker.num_openings
        endpoint.breaker.failed(now_s)
        return endpoint.breaker.num_openings > before

    def paused(self, started: Started, until_s: float) -> None:
        """Note that the server is alive and wants no request before `until_s`."""
        self.succeeded(started)
        started.endpoint.paused_until_s = max(started.endpoint.paused_until_s, until_s)

    def cancelled(self, started: Started) -> None:
        """Note that the request ended without an outcome."""
        started.endpoint.num_in_flight -= 1
        started.endpoint.breaker.cancelled(started.is_probe)

    def _free_at(self, endpoint: Endpoint, now_s: float) -> float:
        if endpoint.num_in_flight >= self._max_concurrency:
            return inf
        return max(endpoint.breaker.admits_at(now_s), endpoint.paused_until_s)
