# SPDX-License-Identifier: Apache-2.0
"""The driver's watch over everything that it waits for, and the event loop that watches while the driver blocks.

verl's loop is synchronous. A thread that waits in `ray.get` cannot be interrupted, but its call raises at once when the
actor is killed.

| the driver waits | for what | ended by |
| --- | --- | --- |
| in verl's blocking calls | weights, checkpoints | `watch`: processes that do not answer are killed |
| in a coroutine of ours | the conductor's calls | `unless_lost`, which is cancelled; each call has a deadline besides |
| in a loop that polls | prompts that end | `check_progress`, also if none ends for `no_progress_s` |
| in a call of TransferQueue, forever | its controller | the call is cancelled |

The processes of `watch_processes`, which no deadline covers, have heartbeats: the first that does not answer within
`digen.deadlines.answer_s` ends the run, wherever the driver waits.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from verl_digen.errors import DeadlineMissed, ProcessLost, RunStopped, describe, plain
from verl_digen.processes.actors import silence
from verl_digen.processes.calls import Patience
from verl_digen.processes.deadlines import Bound, CallKind, Deadlines
from verl_digen.schedulers.types import TRAINER

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CANCEL_EVERY_S = 1.0
"""Seconds between cancellations of the driver's TransferQueue calls once the run must end: it may start new ones."""


class LoopThread:
    """An event loop in its own thread, which runs while the caller does something else.

    Example:
        loop = LoopThread("driver")
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
    """Run blocking `work` in its own thread and return its result; a thread that is overdue is abandoned, and a
    DeadlineMissed names it by `what`, a noun phrase."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    if wait([outcome], bound.seconds).not_done:
        raise DeadlineMissed(what, bound.seconds, bound.key)
    return outcome.result()


class Supervision:
    """Ends the driver's waits.

    Args:
        loop: runs the driver's coroutines.
        step: the current step, for messages.
        end_silent_replicas: kills replicas that do not answer -> their addresses.
        end_all: kills the trainer's ranks and the replicas.
        cancel_queue_calls: fails the driver's TransferQueue calls in flight.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        *,
        loop: LoopThread,
        step: Callable[[], int],
        end_silent_replicas: Callable[[], Awaitable[Sequence[str]]],
        end_all: Callable[[], None],
        cancel_queue_calls: Callable[[], None],
    ):
        self.deadlines, self.loop, self.step = deadlines, loop, step
        self.patience = Patience(deadlines.config, loop.time)
        self._end_silent_replicas, self._end_all = end_silent_replicas, end_all
        self._cancel_queue_calls = cancel_queue_calls
        self._guarded: set[asyncio.Task[Any]] = set()
        self._lost: ProcessLost | None = None
        """Reason why the run must end; None while it may go on."""
        self._missed: DeadlineMissed | None = None
        """A blocking call that was overdue although every replica answered, or had been killed."""

    # -- blocking calls -----------------------------------------------------------------------------------
    @contextmanager
    def watch(self, kind: CallKind, what: str) -> Iterator[None]:
        """Bound blocking calls, and learn from their durations. When they are overdue the processes that they wait for
        are killed: first the replicas that do not answer (RayError), after which the calls get their full time again;
        once all remaining replicas answer, the trainer's ranks and the replicas, which ends the run
        (DeadlineMissed)."""
        began_s = self.loop.time()
        guard = self.loop.begin(self._guard(f"step {self.step()}: {what}", self.deadlines.bound(kind, TRAINER)))
        try:
            yield
        except RayError as error:
            if self._missed is not None:
                raise self._missed from error
            raise
        finally:
            guard.cancel()
        self.deadlines.observe(kind, TRAINER, seconds=self.loop.time() - began_s)

    async def _guard(self, what: str, bound: Bound) -> None:
        """Kill silent replicas, then everything, at the timeout; runs until cancelled."""
        waited_s, ended = 0.0, set[str]()
        while self._missed is None:
            await asyncio.sleep(bound.seconds)
            waited_s += bound.seconds
            logger.error("%s has not ended for %.0f s (%s); asking which processes respond", what, waited_s, bound.key)
            if silent := {*await self._end_silent_replicas()} - ended:
                logger.error("replicas that hang are ended: %s", ", ".join(sorted(silent)))
                ended |= silent
            else:  # all answer, or were killed before
                self._missed = DeadlineMissed(what, waited_s, bound.key)
        logger.error("%s", self._missed)
        self._end_all()

    # -- processes without a deadline ---------------------------------------------------------------------
    def watch_processes(self, processes: Mapping[str, Any]) -> None:
        """Ask actors for heartbeats from now on; a noun phrase names each."""
        for what, process in processes.items():
            self.loop.begin(self._heartbeats(what, process))

    async def _heartbeats(self, what: str, process: Any) -> None:
        """Wait until the process is lost, then end the run wherever the driver waits."""
        answer_s, error = self.deadlines.config.answer_s, None
        while error is None:
            await asyncio.sleep(answer_s)
            error = await silence(process, self.deadlines.config)
        if isinstance(error, asyncio.TimeoutError):
            why = f"gives no sign of life for {answer_s:.0f} s (digen.deadlines.answer_s): it hangs"
        else:
            why = f"is lost ({describe(error)}): look for the reason above, out of memory is common"
        lost = ProcessLost(f"{what} {why}")
        logger.error("%s", lost)
        self._lost = self._lost or lost
        ray.kill(process)  # its calls raise
        for task in self._guarded:
            task.cancel()
        while True:
            self._cancel_queue_calls()
            await asyncio.sleep(CANCEL_EVERY_S)

    def check(self) -> None:
        """Raise ProcessLost if a process is lost."""
        if self._lost is not None:
            raise self._lost

    def check_progress(self, count: int, what: str) -> None:
        """Called by a loop that polls; see `check` and `Patience.check`."""
        self.check()
        self.patience.check(count, lambda: what)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in the driver's loop and return its result; see `unless_lost`."""
        return self.loop.run(self.unless_lost(work))

    async def unless_lost(self, work: Awaitable[Result]) -> Result:
        """Run `work` and return its result. ProcessLost if a process was lost meanwhile."""
        task: asyncio.Task[Result] = asyncio.ensure_future(work)  # type: ignore[assignment]
        self._guarded.add(task)
        try:
            self.check()
            return await task
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self._guarded.discard(task)
            task.cancel()

    # -- the end ------------------------------------------------------------------------------------------
    @contextmanager
    def ends_explained(self) -> Iterator[None]:
        """Raise what a fault of processes, network or disk raises as RunStopped."""
        try:
            yield
        except (RayError, CancelledError, OSError) as error:
            if self._lost is not None:  # it ended the call
                raise self._lost from error
            if isinstance(cause := plain(error), RunStopped):
                raise cause from error
            logger.error("step %d failed", self.step(), exc_info=error)
            raise RunStopped(f"step {self.step()} failed: {describe(error)}") from error
