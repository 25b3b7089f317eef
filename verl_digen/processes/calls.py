# SPDX-License-Identifier: Apache-2.0
"""Calls in flight, each with a deadline: who waits for whom, since when, and until when.

After a long time without any event the log lists every call in flight; after a longer one `run` fails. All waiting goes
through asyncio, and so does time (`loop.time`).

Invariants (tests/processes/test_calls.py): `call` returns or raises within its bound, and `run` as soon as a task
fails. An event takes as long with 1,000 calls in flight as with one: nothing goes through them but for a message.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from verl_digen.errors import DeadlineMissed
from verl_digen.processes.deadlines import Bound, Deadlines, DeadlinesConfig

logger = logging.getLogger(__name__)

CLOCK_MARGIN_S = 1e-3
"""Seconds by which a timer may fire early."""

Result = TypeVar("Result")


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
        """Compare the count with the previous one: DeadlineMissed if it has not changed for
        `digen.deadlines.no_progress_s`. `what` makes a noun phrase that names who is waited for."""
        if count != self._count:
            self.restart(count)
        waited_s = self._now_s() + CLOCK_MARGIN_S - self._since_s
        if waited_s >= self._config.no_progress_s:
            raise DeadlineMissed(what(), waited_s, "digen.deadlines.no_progress_s")
        if waited_s >= self._report_in_s:
            logger.warning("nothing happened for %.0f s; waiting for %s", waited_s, what())
            self._report_in_s *= 2


@dataclass(eq=False)
class Call:
    """A call in flight."""

    what: str
    """A noun phrase that says who was asked for what."""
    since_s: float
    bound: Bound


class CallsUnderWay:
    """Tasks in flight, each a coroutine that makes bounded calls, and one that all of them serve.

    Example:
        calls = CallsUnderWay(deadlines)

        async def way_of(chunk):
            answer, took_s = await calls.call(replica.generate(chunk), what="a chunk", bound=bound)
            ...
            calls.notify()                          # `changed` returns

        calls.spawn(way_of(chunk))                  # what it raises ends `run`
        outcome = await calls.run(train_batch())    # which waits with `await calls.changed()`
    """

    def __init__(self, deadlines: Deadlines):
        self._deadlines = deadlines
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[Call, None] = {}
        """Calls in the order of their start."""
        self._failure: BaseException | None = None
        """The first exception of a spawned task."""
        self._main: asyncio.Task[Any] | None = None
        """The task of `run`, while it runs."""
        self._patience: Patience | None = None
        self._event = asyncio.Event()

    def __len__(self) -> int:
        """Number of spawned tasks that have not ended."""
        return len(self._tasks)

    async def call(self, work: Awaitable[Result], *, what: str, bound: Bound) -> tuple[Result, float]:
        """Await `work` -> (its result, seconds that it took). DeadlineMissed if it was overdue, and is cancelled."""
        call, task = Call(what, _now_s(), bound), asyncio.ensure_future(work)
        self._calls[call] = None
        try:
            await asyncio.wait([task], timeout=bound.seconds)
            took_s = _now_s() - call.since_s
            if task.done():
                return task.result(), took_s
            task.cancel()
            logger.error("overdue: %s; of %s", what, self.describe())
            raise DeadlineMissed(what, took_s, bound.key)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            del self._calls[call]

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begin a task. What it raises is raised by `run`, whose own task is cancelled, or by `raise_failure`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_ended)

    def _on_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            if self._main is not None:
                self._main.cancel()
        self.notify()

    def tell(self, work: Awaitable[None], what: str, *, may_be_late: bool = False) -> None:
        """Begin a notification: a call whose result is not used, bounded like an answer. An overdue one is only logged
        if it may be late."""

        async def bounded() -> None:
            try:
                await self.call(work, what=what, bound=self._deadlines.bound("answer", what))
            except DeadlineMissed as error:
                if not may_be_late:
                    raise
                logger.warning("%s", error)

        self.spawn(bounded())

    def notify(self) -> None:
        """Wake all who wait in `changed`."""
        if self._patience is not None:
            self._patience.restart()
        self._event.set()
        self._event.clear()

    async def changed(self, timeout_s: float | None = None) -> bool:
        """Wait for the next `notify`, at most for `timeout_s`. Returns False at the timeout."""
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        await asyncio.sleep(0)  # what happens in the same pass of the loop counts as one event
        return True

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`, which fails with the first task that fails, now or since the last `run`. DeadlineMissed if
        nothing happened for `digen.deadlines.no_progress_s`."""
        self._main = main = asyncio.ensure_future(work)
        self._patience = Patience(self._deadlines.config, _now_s)
        try:
            if self._failure is not None:
                main.cancel()
            while not main.done():
                await asyncio.wait([main], timeout=self._patience.next_s - _now_s())
                if not main.done():
                    self._patience.check(0, self.describe)
        except (asyncio.CancelledError, DeadlineMissed):
            main.cancel()
            raise
        finally:
            self._main = self._patience = None
        if main.cancelled():
            self.raise_failure()
        return main.result()

    def raise_failure(self) -> None:
        """Raise the exception of a spawned task, if one has failed."""
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()

    def describe(self) -> str:
        """List every call with its elapsed time and its bound."""
        now_s = _now_s()
        calls = "; ".join(
            f"{call.what} for {now_s - call.since_s:.1f} s of at most {call.bound.seconds:.1f} s ({call.bound.key})"
            for call in self._calls
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


def tell(callers: Iterable[asyncio.Future[Any]], outcomes: Sequence[Any]) -> None:
    """Give every caller its outcome, as many as there are callers; an exception is raised there. Cancelled callers are
    passed over."""
    for caller, outcome in zip(callers, outcomes, strict=True):
        if caller.done():
            continue
        if isinstance(outcome, Exception):
            caller.set_exception(outcome)
        else:
            caller.set_result(outcome)
