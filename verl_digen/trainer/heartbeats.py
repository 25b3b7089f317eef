# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of the processes that a run needs and that no deadline covers: agent loop workers and TransferQueue's
controller. Each is asked every `digen.deadlines.answer_s`; the first that does not answer ends the run.

| where the driver is when a process is lost | how it is told |
| --- | --- |
| in a coroutine of ours | `unless_lost` cancels it |
| in a loop that polls | `check` raises |
| in a call of that process | the process is killed, so that the call raises |
| in a call of TransferQueue, which waits for its controller forever | the call is cancelled (`cancel_queue_calls`) |

    heartbeats = Heartbeats(loop.begin, config, cancel_queue_calls)
    heartbeats.watch("agent loop worker 0", handle)
    loop.run(heartbeats.unless_lost(conductor.run_batch()))     # ProcessLost if worker 0 dies or hangs meanwhile
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray

from verl_digen.errors import ProcessLost, describe
from verl_digen.processes.actors import silence
from verl_digen.processes.deadlines import DeadlinesConfig

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CANCEL_EVERY_S = 1.0
"""Seconds between cancellations of the driver's TransferQueue calls once the run must end: it may start new ones."""


class Heartbeats:
    """Args:
    begin: starts a coroutine in the background (`LoopThread.begin`).
    cancel_queue_calls: fails the driver's TransferQueue calls in flight.
    """

    def __init__(self, begin: Callable[[Any], Any], config: DeadlinesConfig, cancel_queue_calls: Callable[[], None]):
        self._begin, self._config, self._cancel_queue_calls = begin, config, cancel_queue_calls
        self._guarded: set[asyncio.Task[Any]] = set()
        self.lost: ProcessLost | None = None
        """Reason why the run must end; None while it may go on."""

    def watch(self, what: str, process: Any) -> None:
        """Ask an actor for heartbeats from now on.

        Args:
            what: a noun phrase that names the process.
        """
        self._begin(self._watch(what, process))

    def check(self) -> None:
        """Raise ProcessLost if a process is lost."""
        if self.lost is not None:
            raise self.lost

    async def unless_lost(self, work: Awaitable[Result]) -> Result:
        """Run `work` and return its result.

        Raises:
            ProcessLost: a process was lost meanwhile. Any exception of `work`.
        """
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

    async def _watch(self, what: str, process: Any) -> None:
        lost: ProcessLost | None = None
        while lost is None:
            await asyncio.sleep(self._config.answer_s)
            lost = await self._loss(what, process)
        logger.error("%s", lost)
        self.lost = self.lost or lost
        ray.kill(process)
        for task in self._guarded:
            task.cancel()
        while True:
            self._cancel_queue_calls()
            await asyncio.sleep(CANCEL_EVERY_S)

    async def _loss(self, what: str, process: Any) -> ProcessLost | None:
        """Reason why the process counts as lost; None while it is alive."""
        error = await silence(process, self._config)
        if isinstance(error, asyncio.TimeoutError):
            return ProcessLost(
                f"{what} gives no sign of life for {self._config.answer_s:.0f} s (digen.deadlines.answer_s): it hangs"
            )
        if error is not None:
            return ProcessLost(
                f"{what} is lost ({describe(error)}): look for the reason above, out of memory is common"
            )
        return None
