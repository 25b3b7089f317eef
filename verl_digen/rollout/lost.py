# SPDX-License-Identifier: Apache-2.0
"""What a trainer rank does about a replica that died: take part in what is collective, and send nothing."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
from ray.exceptions import RayActorError
from torch import Tensor
from verl.workers.rollout.utils import ensure_async_iterator

logger = logging.getLogger(__name__)


class ReplicaHandle:
    """The server of one replica, by its actor's name, until it dies.

    Args:
        name: Ray actor name, looked up at the first call.
    """

    def __init__(self, name: str):
        self.name = name
        self.is_lost = False
        self._actor: Any = None

    async def call(self, method: str, *args: Any) -> Any:
        """The method's answer; None, with a warning the first time, from a replica that is lost."""
        if self.is_lost:
            return None
        try:
            actor = self._look_up()
            return await getattr(actor, method).remote(*args)
        except RayActorError as error:
            logger.warning("replica %s is lost and gets no more weights: %s", self.name, error)
            self.is_lost = True
            return None

    def _look_up(self) -> Any:
        if self._actor is None:
            try:
                self._actor = ray.get_actor(self.name)
            except ValueError as error:  # Ray has forgotten an actor that died long ago
                raise RayActorError() from error
        return self._actor


async def drain(weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]]) -> None:
    """Make every tensor, which takes all ranks, and drop it."""
    async for _ in ensure_async_iterator(weights):
        pass
