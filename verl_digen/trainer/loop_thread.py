# SPDX-License-Identifier: Apache-2.0
"""An event loop in its own thread, which runs while the caller does something else; and blocking work in its own
thread, so that it can time out.

verl's loop is synchronous: between two steps the driver saves, validates and moves weights. Replicas that may begin the
next batch meanwhile are fed from here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from verl_digen.errors import DeadlineMissed
from verl_digen.processes.deadlines import Bound

Result = TypeVar("Result")


class LoopThread:
    """Example:

    loop = LoopThread("conductor")
    loop.run(conductor.run_batch())     # blocks the caller; tasks that the coroutine started run on afterwards
    """

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        # a daemon: a run that stops does not wait for replicas
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def time(self) -> float:
        """Seconds on the loop's clock."""
        return self._loop.time()

    def begin(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start `work` in the loop and return at once. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in the loop; return its result or raise its exception."""
        return self.begin(work).result()


def within(bound: Bound, work: Callable[[], Result], *, what: str) -> Result:
    """Run blocking `work` in its own thread and return its result; a thread that is overdue is abandoned.

    Args:
        what: a noun phrase that names the work.

    Raises:
        DeadlineMissed: it is overdue. Any exception of `work`.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        return outcome.result(bound.seconds)
    except FutureTimeout as error:
        if outcome.done():
            raise  # raised by `work`
        raise DeadlineMissed(what, bound.seconds, bound.key) from error
