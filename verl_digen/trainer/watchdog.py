# SPDX-License-Identifier: Apache-2.0
"""Timeout for verl's blocking calls, which wait for actors without one.

A thread that waits in `ray.get` cannot be interrupted, but its call raises at once when the actor is killed. So when a
watched call is overdue, the processes that it waits for are killed: first the replicas that do not answer, after which
the call gets its full time again; once all remaining replicas answer, the trainer's ranks and the replicas, which ends
the run.

    with watchdog.watch("publishing version 3", bound):
        checkpoint_manager.update_weights(3)      # RayActorError if a replica hangs; DeadlineMissed if a rank does
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayError

from verl_digen.errors import DeadlineMissed
from verl_digen.processes.deadlines import Bound

logger = logging.getLogger(__name__)


class Watchdog:
    """Args:
    begin: starts a coroutine in the background -> something with `cancel` (`LoopThread.begin`).
    end_silent_replicas: kills the replicas that do not answer -> their addresses.
    end_all: kills the trainer's ranks and the replicas.
    """

    def __init__(
        self,
        begin: Callable[[Any], Any],
        *,
        end_silent_replicas: Callable[[], Awaitable[Sequence[str]]],
        end_all: Callable[[], None],
    ):
        self._begin, self._end_silent_replicas, self._end_all = begin, end_silent_replicas, end_all
        self._missed: DeadlineMissed | None = None

    @contextmanager
    def watch(self, what: str, bound: Bound) -> Iterator[None]:
        """Bound the calls inside.

        Raises:
            DeadlineMissed: they were overdue although every replica answered, or had been killed.
        """
        guard = self._begin(self.guard(what, bound))
        try:
            yield
        except RayError as error:
            if self._missed is not None:
                raise self._missed from error
            raise
        finally:
            guard.cancel()

    async def guard(self, what: str, bound: Bound) -> None:
        """Kill silent replicas, then everything, at the timeout; runs until cancelled."""
        waited_s, ended = 0.0, set[str]()
        while self._missed is None:
            await asyncio.sleep(bound.seconds)
            waited_s += bound.seconds
            logger.error("%s has not ended for %.0f s (%s); who gives no sign of life?", what, waited_s, bound.key)
            if silent := {*await self._end_silent_replicas()} - ended:
                logger.error("replicas that hang are ended: %s", ", ".join(sorted(silent)))
                ended |= silent
            else:  # all answer, or were killed before
                self._missed = DeadlineMissed(what, waited_s, bound.key)
        logger.error("%s", self._missed)
        self._end_all()
