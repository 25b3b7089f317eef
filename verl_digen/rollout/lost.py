# SPDX-License-Identifier: Apache-2.0
"""Trainer-rank handle for a replica that may die: after that, join the collectives and send nothing."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from torch import Tensor
from verl.workers.rollout.utils import ensure_async_iterator

from verl_digen.blips import through_blips

logger = logging.getLogger(__name__)


class ReplicaHandle:
    """Handle on one replica's server, found by its actor's name. A call may be retried, so methods must be idempotent.

    Args:
        name: Ray actor name, looked up at the first call.
        blip_s: `digen.deadlines.blip_s`. A server that is unreachable for longer is killed: it would miss weights.
    """

    def __init__(self, name: str, blip_s: float):
        self.name = name
        self.is_lost = False
        self._blip_s = blip_s
        self._actor: Any = None

    def find_successor(self) -> None:
        """Switch to the server that replaced a lost one, if it has started."""
        if not self.is_lost:
            return
        try:
            actor = ray.get_actor(self.name)
        except ValueError:
            return  # Ray has dropped the lost actor, and there is no new one yet
        if actor != self._actor:
            self._actor, self.is_lost = actor, False

    async def call(self, method: str, *args: Any) -> Any:
        """The method's answer; None if the replica is lost (with a warning the first time)."""
        if self.is_lost:
            return None
        try:
            actor = self._look_up()
            return await through_blips(lambda: getattr(actor, method).remote(*args), self._blip_s)
        except RayActorError as error:
            logger.warning("replica %s is lost and gets no more weights: %s", self.name, error)
            self.is_lost = True
            if isinstance(error, ActorUnavailableError):
                ray.kill(actor)
            return None

    def _look_up(self) -> Any:
        if self._actor is None:
            try:
                self._actor = ray.get_actor(self.name)
            except ValueError as error:  # Ray has forgotten an actor that died long ago
                raise RayActorError() from error
        return self._actor


async def drain(weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]]) -> None:
    """Materialise and drop every tensor; making one is a collective of all ranks."""
    async for _ in ensure_async_iterator(weights):
        pass
