# SPDX-License-Identifier: Apache-2.0
"""Answers of many calls to Ray actors.

`asyncio.gather` over Ray's references wakes the loop for every answer. Here Ray's own threads take the answers, and the
loop is woken once, which saves a caller a quarter of its CPU time (docs/control_plane.md).

Invariants (tests/processes/test_answers.py): answers have the order of the calls; the first failure is raised at once,
whatever else is still awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any


@dataclass(frozen=True)
class Sent:
    """A call that was sent."""

    future: Future[Any]
    read: Callable[[Future[Any]], list[Any]]
    """Answers of the processes that the call reaches, from the future when it is done; raises their failure. Runs in
    one of Ray's threads, or in the caller's if the answer is there already."""


async def answers_of(calls: Sequence[Sent]) -> list[list[Any]]:
    """Wait for all calls -> what each of them reads.

    Raises:
        Exception: the first failure.
    """
    if not calls:
        return []
    awaited = _Awaited(calls, asyncio.get_running_loop())
    for number, call in enumerate(calls):
        call.future.add_done_callback(partial(awaited.take, number))
    return await awaited.all


class _Awaited:
    """Calls of which some are not answered yet."""

    def __init__(self, calls: Sequence[Sent], loop: asyncio.AbstractEventLoop):
        self.all: asyncio.Future[list[list[Any]]] = loop.create_future()
        self._calls, self._loop = calls, loop
        self._answers: list[list[Any]] = [[]] * len(calls)
        self._num_left, self._lock = len(calls), Lock()

    def take(self, number: int, future: Future[Any]) -> None:
        """Take the answer of call `number`; in any thread."""
        try:
            self._answers[number] = self._calls[number].read(future)
        except Exception as error:
            self._wake(self.all.set_exception, error)
            return
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self._wake(self.all.set_result, self._answers)

    def _wake(self, settle: Callable[[Any], None], outcome: Any) -> None:
        if not self._loop.is_closed():  # the waiter may be gone since another call failed
            self._loop.call_soon_threadsafe(self._settle, settle, outcome)

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        if not self.all.done():
            settle(outcome)
