# SPDX-License-Identifier: Apache-2.0
"""A bound on blocking calls of verl's, which wait for actors without one.

A thread that waits in `ray.get` cannot be interrupted, but it hears at once of an actor that is ended. So when a
watched call is overdue, the processes that it waits for are ended: first the replicas that give no sign of life, each
time giving the call its time once more, and if all that are left give one, the trainer's ranks and the replicas, which
ends the run.

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
from verl_digen.schedulers.deadlines import Bound

logger = logging.getLogger(__name__)


class Watchdog:
    """Args:
    begin: starts a coroutine beside the caller -> something with `cancel` (`LoopThread.begin`).
    end_silent_replicas: ends the replicas that give no sign of life -> their addresses.
    end_all: ends the trainer's ranks and the replicas.
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
            DeadlineMissed: they were overdue although every replica gave a sign of life, or had been ended.
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
        """End silent replicas, then everything, when the time comes; until cancelled."""
        waited_s = 0.0
        while self._missed is None:
            await asyncio.sleep(bound.seconds)
            waited_s += bound.seconds
            logger.error("%s has not ended for %.0f s (%s); who gives no sign of life?", what, waited_s, bound.key)
            if ended := await self._end_silent_replicas():
                logger.error("replicas that hang are ended: %s", ", ".join(ended))
            else:
                self._missed = DeadlineMissed(what, waited_s, bound.key)
        logger.error("%s", self._missed)
        self._end_all()
