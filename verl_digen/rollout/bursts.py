# SPDX-License-Identifier: Apache-2.0
"""Bursts: which of the requests that were announced to come together have arrived.

A caller that sends several requests at the same time names them (`SampleRequest.burst`), so that a replica starts them
as soon as the last one is there, instead of waiting whether another one comes.

Invariant (tests/rollout/test_bursts.py): a burst counts as complete from the arrival of its last request on, however
many of the earlier ones have started, ended or been cancelled meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from verl_digen.types import Burst


class Bursts:
    """Counts arrivals.

    Example:
        bursts = Bursts()
        bursts.arrive(Burst("7", 2))                       # the first of two
        bursts.are_complete([Burst("7", 2)])               # False
        bursts.arrive(Burst("7", 2))
        bursts.are_complete([Burst("7", 2)])               # True
        bursts.are_complete([Burst("7", 2), None])         # False: more requests may follow one without a burst
    """

    def __init__(self) -> None:
        self._missing: dict[str, int] = {}
        """Name -> requests that have not arrived, of bursts that have begun and are not complete."""

    def arrive(self, burst: Burst | None) -> None:
        """Count one request."""
        if burst is None:
            return
        missing = self._missing.get(burst.name, burst.size) - 1
        if missing > 0:
            self._missing[burst.name] = missing
        else:
            self._missing.pop(burst.name, None)

    def are_complete(self, bursts: Iterable[Burst | None]) -> bool:
        """True if each of the requests that wait belongs to a burst that has arrived whole."""
        return all(burst is not None and burst.name not in self._missing for burst in bursts)

    def forget_all_but(self, bursts: Iterable[Burst | None]) -> None:
        """Forget incomplete bursts without a request in `bursts`: their other requests may never come."""
        names = {burst.name for burst in bursts if burst is not None}
        self._missing = {name: missing for name, missing in self._missing.items() if name in names}
