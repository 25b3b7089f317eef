# SPDX-License-Identifier: Apache-2.0
"""Calls in flight, each with a deadline: who waits for whom, since when, and until when.

- `start` begins a call with two callbacks, one for its end and one for its timeout. An overdue call is cancelled and
  forgotten: exactly one of the two callbacks runs.
- `next_events` waits until a call ends or is overdue, and handles every such call.
- After a long time without any event the log lists every call in flight; after a longer one the run ends.

All waiting goes through asyncio, and so does time (`loop.time`).

Invariants (tests/processes/test_calls.py)
- `next_events` returns within the smallest bound of the calls in flight.
- Calls that end at the same time are handled in the order in which they were started.
- An event takes as long with 1,000 calls in flight as with one: nothing goes through them but when a deadline passes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from verl_digen.errors import DeadlineMissed
from verl_digen.processes.deadlines import Bound, Deadlines, DeadlinesConfig

logger = logging.getLogger(__name__)

CLOCK_MARGIN_S = 1e-3
"""Seconds by which a timer may fire early."""

OnEnded = Callable[[asyncio.Task[Any], float], None]
"""(the ended task, seconds that it took)."""

OnOverdue = Callable[[DeadlineMissed], None]


class Patience:
    """Timeout of a wait for events: how long a count may stay the same.

    Example:
        patience = Patience(config, time.monotonic)
        while (num_ended := count_ended()) < num_prompts:
            patience.check(num_ended, lambda: "validation")    # DeadlineMissed after digen.deadlines.no_progress_s
            time.sleep(poll_s)
    """

    def __init__(self, config: DeadlinesConfig, now_s: Callable[[], float]):
        self._config, self._now_s = config, now_s
        self.restart()

    def restart(self, count: int = 0) -> None:
        """Begin a new wait."""
        self._count, self._since_s, self._report_in_s = count, self._now_s(), self._config.report_s

    @property
    def next_s(self) -> float:
        """Moment of the next report, or of the end."""
        return self._since_s + min(self._report_in_s, self._config.no_progress_s)

    def check(self, count: int, what: Callable[[], str]) -> None:
        """Compare the count with the previous one.

        Args:
            what: makes a noun phrase that names who is waited for.

        Raises:
            DeadlineMissed: it has not changed for `digen.deadlines.no_progress_s`.
        """
        if count != self._count:
            self.restart(count)
        waited_s = self._now_s() + CLOCK_MARGIN_S - self._since_s
        if waited_s >= self._config.no_progress_s:
            raise DeadlineMissed(what(), waited_s, "digen.deadlines.no_progress_s")
        if waited_s >= self._report_in_s:
            logger.warning("nothing happened for %.0f s; waiting for %s", waited_s, what())
            self._report_in_s *= 2


@dataclass(frozen=True)
class Call:
    """A call in flight."""

    what: str
    """A noun phrase that says who was asked for what."""
    since_s: float
    bound: Bound
    on_ended: OnEnded
    on_overdue: OnOverdue | None
    number: int
    """Calls are numbered in the order of their start."""

    @property
    def deadline_s(self) -> float:
        return self.since_s + self.bound.seconds


class CallsUnderWay:
    """Args:
    deadlines: when to report, and when to time out.

    Example:
        calls = CallsUnderWay(deadlines)
        calls.start(trainer.commit(), what="the optimizer step", bound=bound, on_ended=on_committed)
        await calls.next_events()       # True; on_committed was called, or DeadlineMissed is raised
    """

    def __init__(self, deadlines: Deadlines):
        self._deadlines = deadlines
        self._calls: dict[asyncio.Task[Any], Call] = {}
        self._ended: list[asyncio.Task[Any]] = []
        """Calls that ended and are not handled yet."""
        self._earliest_s = inf
        """No call in flight has an earlier deadline; it may be that of one that ended."""
        self._num_started = 0
        self._waiter: asyncio.Future[None] | None = None
        """Set while `next_events` waits."""

    def __len__(self) -> int:
        return len(self._calls)

    def start(
        self,
        work: Awaitable[Any],
        *,
        what: str,
        bound: Bound,
        on_ended: OnEnded,
        on_overdue: OnOverdue | None = None,
    ) -> None:
        """Begin `work`; `next_events` calls one of `on_ended` and `on_overdue`, or raises where there is no latter."""
        task = asyncio.ensure_future(self._run(work))
        if isinstance(work, Coroutine):  # a task that is cancelled before it starts does not await it
            task.add_done_callback(lambda _: work.close())
        self._num_started += 1
        call = Call(what, _now_s(), bound, on_ended, on_overdue, self._num_started)
        self._calls[task] = call
        self._earliest_s = min(self._earliest_s, call.deadline_s)

    async def _run(self, work: Awaitable[Any]) -> Any:
        """Await `work`, and note its end in the same pass of the loop, as a callback of the task would not."""
        task = asyncio.current_task()
        assert task is not None
        try:
            return await work
        finally:
            # not if it was overdue, or is dropped after its loop was closed
            if task in self._calls and not task.get_loop().is_closed():
                self._ended.append(task)
                self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def tell(self, work: Awaitable[None], what: str, on_overdue: OnOverdue | None = None) -> None:
        """Begin a notification: a call whose result is not used, bounded like an answer."""
        bound = self._deadlines.bound("answer", what)
        self.start(work, what=what, bound=bound, on_ended=lambda task, took_s: task.result(), on_overdue=on_overdue)

    async def next_events(self, timeout_s: float | None = None) -> bool:
        """Wait until calls end or are overdue, at most for `timeout_s`, and handle them. Returns False at the timeout.

        Raises:
            DeadlineMissed: nothing happened for `digen.deadlines.no_progress_s`. Any exception of the handlers.
        """
        patience = Patience(self._deadlines.config, _now_s)
        ask_again_s = inf if timeout_s is None else _now_s() + timeout_s
        while True:
            await self._wait_s(min(ask_again_s, patience.next_s, self._earliest_s) - _now_s())
            now_s = _now_s() + CLOCK_MARGIN_S
            has_ended = self._handle_ended()
            if self._give_up(now_s) or has_ended:
                return True
            if now_s >= ask_again_s:
                return False
            patience.check(0, self.describe)

    async def _wait_s(self, seconds: float) -> None:
        """Wait until a call has ended, at most for `seconds`."""
        if not self._ended:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(max(0.0, seconds), self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        await asyncio.sleep(0)  # one pass of the loop: calls that ended meanwhile are handled with it

    def _handle_ended(self) -> bool:
        """Handle the calls that have ended, in the order in which they were started. Returns False if there is none."""
        if not self._ended:
            return False
        self._ended.sort(key=lambda task: self._calls[task].number)
        while self._ended:  # a handler may raise: the others are left
            task = self._ended.pop(0)
            call = self._calls.pop(task)
            call.on_ended(task, _now_s() - call.since_s)
        return True

    def _give_up(self, now_s: float) -> bool:
        """Cancel the overdue calls. Returns False if there is none. O(calls in flight) once a deadline has passed."""
        if now_s < self._earliest_s:
            return False
        overdue = [task for task, call in self._calls.items() if not task.done() and call.deadline_s <= now_s]
        if overdue:
            logger.error("overdue: %d of %s", len(overdue), self.describe())
        for task in overdue:
            call = self._calls.pop(task, None)
            if call is not None:  # None: forgotten by the handler of another call
                task.cancel()
                error = DeadlineMissed(call.what, _now_s() - call.since_s, call.bound.key)
                if call.on_overdue is None:
                    raise error
                call.on_overdue(error)
        self._earliest_s = min((call.deadline_s for call in self._calls.values()), default=inf)
        return bool(overdue)

    def describe(self) -> str:
        """List every call with its elapsed time and its bound."""
        now_s = _now_s()
        calls = "; ".join(
            f"{call.what} for {now_s - call.since_s:.1f} s of at most {call.bound.seconds:.1f} s ({call.bound.key})"
            for call in self._calls.values()
        )
        return f"every call under way ({calls})"


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def to_the_end(work: Awaitable[None], seconds: float, what: str) -> None:
    """Run `work`, also when the caller is cancelled meanwhile. A timeout is only logged: the run is about to end."""

    async def bounded() -> None:
        try:
            await asyncio.wait_for(work, seconds)
        except asyncio.TimeoutError:
            logger.error("%s did not answer for %.0f s; its processes end with the run", what, seconds)

    running = asyncio.ensure_future(bounded())
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await running
        raise


async def cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end; an exception that it raised is raised."""
    task.cancel()
    await asyncio.wait([task])  # unlike `await task`, ends with CancelledError only if the caller is cancelled
    if not task.cancelled():
        task.result()


def tell(callers: Iterable[asyncio.Future[Any]], outcomes: Sequence[Any]) -> None:
    """Give every caller its outcome, as many as there are callers; an exception is raised there.

    A caller that was cancelled meanwhile is passed over.
    """
    for caller, outcome in zip(callers, outcomes, strict=True):
        if caller.done():
            continue
        if isinstance(outcome, Exception):
            caller.set_exception(outcome)
        else:
            caller.set_result(outcome)
