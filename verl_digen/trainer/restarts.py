# SPDX-License-Identifier: Apache-2.0
"""Replicas started in place of lost ones; they join when weights are next published.

- On its own devices a replica starts in the background, under a new number, so that it reuses no name of a lost one. If
  every other one is lost meanwhile, the run waits for it.
- On the trainer's devices it starts between two steps, while the others sleep, with the rank of the lost one.
- At most `digen.rollout.max_restarts` per run, over all replicas; a failed start counts.

Invariant (tests/trainer/test_restarts.py): living, starting and ready replicas never exceed the initial number.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from verl_digen.agent_loop.chunks import describe
from verl_digen.processes.actors import retried

logger = logging.getLogger(__name__)


class Restarts:
    """Args:
    begin: starts a coroutine in the background -> its future (`LoopThread.begin`).
    start: starts the replica with this number; raises if it cannot.
    num_replicas: initial number of replicas; theirs are the numbers below it.
    max_restarts: limit per run.
    start_s: bound of one start.
    """

    def __init__(
        self,
        begin: Callable[[Any], Any],
        start: Callable[[int], Awaitable[Any]],
        *,
        num_replicas: int,
        max_restarts: int,
        start_s: float,
    ):
        self._begin, self._start = begin, start
        self.num_replicas, self._max_restarts, self._start_s = num_replicas, max_restarts, start_s
        self._starting: list[Any] = []
        self.num_begun = 0
        """Starts so far, failed ones included."""

    def replace_lost(self, num_living: int) -> None:
        """Start the missing replicas, within the limit."""
        num_missing = self.num_replicas - num_living - len(self._starting)
        num_allowed = self._max_restarts - self.num_begun
        if num_missing > num_allowed:
            logger.warning(
                "%d lost replicas stay lost: digen.rollout.max_restarts=%d is used up",
                num_missing - num_allowed,
                self._max_restarts,
            )
        for _ in range(min(num_missing, num_allowed)):
            number = self.num_replicas + self.num_begun
            self.num_begun += 1
            logger.warning("replica %d is started in place of a lost one", number)
            self._starting.append(self._begin(asyncio.wait_for(self._start(number), self._start_s)))

    def wait(self) -> None:
        """Block until every start has succeeded or failed; each has its bound."""
        concurrent.futures.wait(self._starting)

    @property
    def is_starting(self) -> bool:
        """True while a replica is started, or has been and is not taken."""
        return bool(self._starting)

    async def one_ended(self) -> None:
        """Wait until a start has succeeded or failed; each has its bound."""
        await asyncio.wait([asyncio.wrap_future(one) for one in self._starting], return_when=asyncio.FIRST_COMPLETED)

    def take_ready(self) -> list[Any]:
        """Replicas that have started since the last call."""
        ended = [future for future in self._starting if future.done()]
        self._starting = [future for future in self._starting if future not in ended]
        ready = []
        for future in ended:
            error = future.exception()
            if error is None:
                ready.append(future.result())
            else:
                logger.error("a replica could not be started again: %s", describe(error))
        return ready


async def start_standalone(server_manager: Any, number: int, start_s: float) -> Any:
    """Start one of verl's replicas on devices of its own, as soon as those are free.

    Args:
        server_manager: verl's `LLMServerManager`, which started the first ones.
        start_s: how long to wait for devices.
    """
    return await asyncio.to_thread(_start, server_manager, number, lambda replica: replica.init_standalone(), start_s)


async def start_colocated(server_manager: Any, rank: int, start_s: float) -> Any:
    """Start one of verl's replicas on the trainer's devices, in place of the lost one of the same rank, as soon as the
    lost one's name is free.

    Args:
        server_manager: verl's `LLMServerManager`, which started the first ones. start_s: how long to wait.
    """
    return await asyncio.to_thread(
        _start, server_manager, rank, lambda replica: replica.init_hybrid(server_manager.worker_group), start_s
    )


def _start(server_manager: Any, rank: int, init: Callable[[Any], Awaitable[None]], start_s: float) -> Any:
    """Start a replica, in a thread because verl blocks in coroutines."""
    replica = server_manager.rollout_replica_class(
        replica_rank=rank,
        config=server_manager.rollout_config,
        model_config=server_manager.model_config,
        gpus_per_node=server_manager.rollout_config.n_gpus_per_node,
    )
    # verl and Ray raise it while the lost replica's devices or names are not given back yet
    asyncio.run(retried(lambda: init(replica), start_s, on=ValueError))
    return replica
