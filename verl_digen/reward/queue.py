# SPDX-License-Identifier: Apache-2.0
"""Queue in front of a reward: what waits is scored together, one call at a time.

- A call starts when `max_batch_size` samples wait, or when no sample has arrived for `wait_s`. Samples that arrive
  during a call wait for the next one, so that calls grow with the load.
- Samples are taken in the order in which they came; a caller that is cancelled leaves the queue.
- A queue that is paused takes samples and starts no call.

Invariants (tests/reward/test_scoring.py, test_timeshared.py): n samples that wait together make
ceil(n / max_batch_size) calls; every sample gets its own outcome; no call runs while the queue is paused.

Bound: one entry per caller, because each caller waits for its own outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from verl_digen.processes.calls import tell

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


class BatchQueue(Generic[Item, Outcome]):
    """See the module.

    Args:
        run: (items, number of other items in the queue) -> an outcome or an exception per item, in order.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item], int], Awaitable[Sequence[Outcome | Exception]]],
        *,
        max_batch_size: int,
        wait_s: float,
    ):
        self._run_batch, self.max_batch_size, self._wait_s = run, max_batch_size, wait_s
        self._pending: list[tuple[Item, asyncio.Future[Outcome]]] = []
        self._arrived = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._running = asyncio.Lock()
        """Held by a call."""

    def hold(self) -> None:
        """Start no further call."""
        self._is_open.clear()

    async def pause(self) -> None:
        """Start no further call, and return when the one that runs has ended."""
        self.hold()
        async with self._running:
            pass

    def resume(self) -> None:
        """Start calls again."""
        self._is_open.set()

    async def submit(self, item: Item) -> Outcome:
        """The item's outcome; raises its exception."""
        if self._loop is None:
            self._loop = asyncio.create_task(self._run())
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._pending.append((item, answer))
        self._arrived.set()
        return await answer

    async def _run(self) -> None:
        while True:
            await self._until_ready()
            while not self._is_open.is_set():  # it may be paused again before this goes on
                await self._is_open.wait()
            waiting = [entry for entry in self._pending if not entry[1].done()]  # the others were cancelled
            batch, self._pending = waiting[: self.max_batch_size], waiting[self.max_batch_size :]
            if not batch:
                continue
            try:
                async with self._running:
                    outcomes = await self._run_batch([item for item, _ in batch], len(self._pending))
            except Exception as error:  # every caller is told
                outcomes = [error] * len(batch)
            tell((answer for _, answer in batch), outcomes)

    async def _until_ready(self) -> None:
        while not self._pending:
            self._arrived.clear()
            await self._arrived.wait()
        while len(self._pending) < self.max_batch_size:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), self._wait_s)
            except asyncio.TimeoutError:
                return
