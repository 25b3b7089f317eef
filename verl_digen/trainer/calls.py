# SPDX-License-Identifier: Apache-2.0
"""Calls in flight, each with a deadline: who waits for whom, since when, and until when.

- `start` begins a call with two callbacks, one for its end and one for its timeout. An overdue call is cancelled and
  forgotten: exactly one of the two callbacks runs.
- `next_events` waits until a call ends or is overdue, and handles every such call.
- After a long time without any event the log lists every call in flight; after a longer one the run ends.

All waiting goes through asyncio, and so does time (`loop.time`).

Invariants (tests/trainer/test_calls.py)
- `next_events` returns within the smallest bound of the calls in flight.
- Calls that end at the same time are handled in the order in which they were started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from verl_digen.errors import DeadlineMissed
from verl_digen.schedulers.deadlines import Bound, Deadlines, DeadlinesConfig
from verl_digen.schedulers.types import Chunk

logger = logging.getLogger(__name__)

CLOCK_MARGIN_S = 1e-3
"""Seconds by which a timer may fire early."""

OnEnded = Callable[[asyncio.Task[Any], float], None]
"""(the ended task, seconds that it took)."""

OnOverdue = Callable[[DeadlineMissed], None]


def end_run(error: DeadlineMissed) -> None:
    """`on_overdue` of a call that the run needs: raise the error."""
    raise error


def log_overdue(error: DeadlineMissed) -> None:
    """`on_overdue` of a call whose failure another bound detects: only log the error."""
    logger.warning("%s", error)


@dataclass(frozen=True)
class Call:
    """A call in flight."""

    what: str
    """A noun phrase that says who was asked for what."""
    since_s: float
    bound: Bound
    on_ended: OnEnded
    on_overdue: OnOverdue

    @property
    def deadline_s(self) -> float:
        return self.since_s + self.bound.seconds


class CallsUnderWay:
    """Args:
    config: when to report, and when to time out.

    Example:
        calls = CallsUnderWay(config)
        calls.start(trainer.commit(), what="the optimizer step", bound=bound, on_ended=on_committed)
        await calls.next_events()       # True; on_committed was called, or DeadlineMissed is raised
    """

    def __init__(self, config: DeadlinesConfig):
        self._config = config
        self._calls: dict[asyncio.Task[Any], Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def start(
        self,
        work: Awaitable[Any],
        *,
        what: str,
        bound: Bound,
        on_ended: OnEnded,
        on_overdue: OnOverdue = end_run,
    ) -> None:
        """Begin `work`; one of `on_ended` and `on_overdue` is called from `next_events`."""
        task: asyncio.Task[Any] = asyncio.ensure_future(work)  # type: ignore[assignment]
        self._calls[task] = Call(what, _now_s(), bound, on_ended, on_overdue)

    def tell(self, work: Awaitable[None], what: str, deadlines: Deadlines, on_overdue: OnOverdue = end_run) -> None:
        """Begin a notification: a call whose result is not used, bounded like an answer."""
        bound = deadlines.bound("answer", what)
        self.start(work, what=what, bound=bound, on_ended=_require_success, on_overdue=on_overdue)

    async def next_events(self, timeout_s: float | None = None) -> bool:
        """Wait until calls end or are overdue, at most for `timeout_s`, and handle them. Returns False at the timeout.

        Raises:
            DeadlineMissed: nothing happened for `digen.deadlines.no_progress_s`. Any exception of the handlers.
        """
        began_s = _now_s()
        give_up_s = began_s + self._config.no_progress_s
        ask_again_s = give_up_s if timeout_s is None else began_s + timeout_s
        report_in_s = self._config.report_s
        while True:
            wake_s = min(
                ask_again_s, give_up_s, began_s + report_in_s, *(call.deadline_s for call in self._calls.values())
            )
            done, _ = await asyncio.wait(
                self._calls, timeout=max(0.0, wake_s - _now_s()), return_when=asyncio.FIRST_COMPLETED
            )
            now_s = _now_s() + CLOCK_MARGIN_S
            ended = [task for task in self._calls if task in done]
            overdue = [task for task, call in self._calls.items() if task not in done and call.deadline_s <= now_s]
            for task in ended:
                call = self._calls.pop(task)
                call.on_ended(task, _now_s() - call.since_s)
            if overdue:
                self._give_up(overdue)
            if ended or overdue:
                return True
            if now_s >= give_up_s:
                raise DeadlineMissed(
                    f"every call under way ({self.describe()})", _now_s() - began_s, "digen.deadlines.no_progress_s"
                )
            if now_s >= ask_again_s:
                return False
            if now_s >= began_s + report_in_s:
                logger.warning("nothing happened for %.0f s; under way: %s", report_in_s, self.describe())
                report_in_s *= 2

    def _give_up(self, overdue: list[asyncio.Task[Any]]) -> None:
        logger.error("overdue: %d of the calls under way: %s", len(overdue), self.describe())
        for task in overdue:
            call = self._calls.pop(task, None)
            if call is not None:  # None: forgotten by the handler of another call
                task.cancel()
                call.on_overdue(DeadlineMissed(call.what, _now_s() - call.since_s, call.bound.key))

    def describe(self) -> str:
        """List every call with its elapsed time and its bound."""
        now_s = _now_s()
        return "; ".join(
            f"{call.what} for {now_s - call.since_s:.1f} s of at most {call.bound.seconds:.1f} s ({call.bound.key})"
            for call in self._calls.values()
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _require_success(task: asyncio.Task[None], took_s: float) -> None:
    task.result()


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


def described(chunk: Chunk, *others: Chunk) -> str:
    """Chunks of one call, for a person."""
    return f"chunk {chunk.id} ({len(chunk.samples)} samples of group {chunk.uid}{', and more' if others else ''})"
