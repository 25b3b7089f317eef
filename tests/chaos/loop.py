# SPDX-License-Identifier: Apache-2.0
"""An event loop whose clock is a number: hours cost milliseconds, and the same work runs in the same order every time.

- `time()` jumps to the next timer as soon as nothing is ready. Nothing reads a socket or a real clock.
- Tasks hash by the order of their creation, so that a set of them (`asyncio.wait`) has one order in every process.
- With nothing ready and no timer set there is a deadlock: `Stuck`, which says who waits where.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

MAX_TIME_S = 1e6
"""Virtual time after which a run counts as stuck: it polls for something that never comes."""

MAX_TURNS = 400_000
"""Turns of the loop after which a run counts as stuck: it spins without time going by."""


class Stuck(BaseException):
    """A deadlock: no event is left. Not an `Exception`, so that no handler under test catches it."""


class NumberedTask(asyncio.Task[Any]):
    """A task with a hash that is the same in every process."""

    _numbers = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any):
        self._number = next(self._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """Example:

    loop = VirtualLoop()
    loop.run(asyncio.sleep(3600))   # at once
    loop.time()                     # 3600.0
    """

    def __init__(self) -> None:
        super().__init__()
        NumberedTask._numbers = itertools.count()
        self._now_s = 0.0
        self._num_turns = 0
        self._is_closing = False
        self._selector = self  # what BaseEventLoop asks for input, and how long it may sleep
        self.set_task_factory(lambda loop, work, **options: NumberedTask(work, loop=loop, **options))
        self.set_exception_handler(lambda loop, context: None)  # a process that died cannot report to anyone

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `work` in the background -> its task, as the trainer's loop thread does."""
        return self.create_task(work)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` to its end; tasks that it started go on with the next call. Like `LoopThread.run`."""
        return self.run_until_complete(work)

    def close(self) -> None:
        """Cancel the tasks in flight, and close the loop."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        self._is_closing = True
        self.call_soon(self.stop)
        self.run_forever()
        super().close()

    def __del__(self) -> None:
        """Do nothing: the loop holds no socket."""

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run `work` here: in a thread, the order would depend on the machine."""
        future = self.create_future()
        try:
            future.set_result(work(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    # -- what BaseEventLoop expects of a selector and a wake-up channel ------------------------------------
    def select(self, timeout_s: float | None) -> list[Any]:
        """Advance the clock by `timeout_s`."""
        if self._is_closing:
            return []
        self._num_turns += 1
        if timeout_s is None:
            raise Stuck("nothing is ready and no timer is set")
        self._now_s += timeout_s
        if self._now_s > MAX_TIME_S:
            raise Stuck(f"not over after {MAX_TIME_S:g} s")
        if self._num_turns > MAX_TURNS:
            raise Stuck(f"not over after {MAX_TURNS} turns of the loop")
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run_in_virtual_time(work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work` to its end on a `VirtualLoop` of its own -> its result.

    Raises:
        Stuck: `work` waits for something that never comes.
    """
    loop = VirtualLoop()
    try:
        return loop.run(work)
    finally:
        loop.close()


def who_waits(loop: asyncio.AbstractEventLoop) -> list[str]:
    """For each unfinished task, the functions it waits in, outermost first."""
    chains = (" > ".join(_frames(task.get_coro())) for task in asyncio.all_tasks(loop))
    return sorted(chain for chain in chains if chain)


def _frames(work: Any) -> Iterator[str]:
    while work is not None:
        if hasattr(work, "cr_code"):
            line = work.cr_frame.f_lineno if work.cr_frame else "?"
            yield f"{work.__qualname__}:{line}"
        work = getattr(work, "cr_await", None)
