# SPDX-License-Identifier: Apache-2.0
"""Trainer-rank handle for a replica that may die, and the calls of a weight update: after its death, join the
collectives and send nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from torch import Tensor
from verl.workers.rollout.utils import ensure_async_iterator

from verl_digen.processes.actors import retried
from verl_digen.weights.checksum import Checksum, Manifest
from verl_digen.weights.sending import ReceiverDied, Wire, send_update

logger = logging.getLogger(__name__)


class ReplicaHandle:
    """Handle on one replica's server, found by its actor's name at the first call. A call may be retried, so methods
    must be idempotent. A server that is unreachable for longer than `blip_s` is killed: it would miss weights."""

    def __init__(self, name: str, blip_s: float):
        self.name = name
        self.is_lost = False
        self._blip_s = blip_s
        self._actor: Any = None

    def find_successor(self) -> None:
        """Switch to the server that replaced a lost one, if it has started."""
        if self.is_lost and (actor := _find(self.name)) not in (None, self._actor):
            self._actor, self.is_lost = actor, False

    async def call(self, method: str, *args: Any) -> Any:
        """The method's answer; None if the replica is lost (with a warning the first time)."""
        if self.is_lost:
            return None
        try:
            actor = self._look_up()
            return await retried(lambda: getattr(actor, method).remote(*args), self._blip_s)
        except RayActorError as error:
            self._lose(error)
            if isinstance(error, ActorUnavailableError):
                ray.kill(actor)
            return None

    async def update(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]],
        wire: Wire,
        version: int,
        *further: Any,
        address: str,
        takes_turns: bool,
        leads: bool = True,
    ) -> None:
        """Send an update to one worker of the replica, between the calls that begin it, with `address`, and end it,
        with the manifest and `further`. A server on its own devices stages it until `activate_weights`; one that takes
        turns with the trainer commits it. Without `leads` a rank only sends: another one calls the server."""
        started_s = time.perf_counter()
        if leads:
            self.find_successor()
            await self.call("begin_update", address, wire.use_shm, wire.is_live)
        total = await self.send(weights, wire)
        if leads and total is not None:
            manifest = Manifest(version, total.num_tensors, total.value)
            await self.call("commit_update" if takes_turns else "seal_update", manifest, *further)
            logger.debug("sent %d tensors in %.3f s", total.num_tensors, time.perf_counter() - started_s)

    async def send(
        self, weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]], wire: Wire
    ) -> Checksum | None:
        """Send an update to one worker of the replica, after its `begin_update` -> checksum of what was sent; None if
        the replica is lost. All `weights` are materialised in both cases, because making one is a collective. Raises as
        `send_update`."""
        if not self.is_lost:
            try:
                has_died = self._watch()
                return await send_update(weights, wire, receiver=self.name, has_died=has_died)
            except (ReceiverDied, RayActorError) as error:
                self._lose(error)
        await drain(weights)
        return None

    def _watch(self) -> Callable[[], bool]:
        """Predicate that is True once the server has died. It does not wait, and may be called while the event loop is
        blocked: it looks at a call that ends no earlier than the update."""
        pending: Future[Any] = self._look_up().until_update_ends.remote().future()
        return lambda: pending.done() and isinstance(pending.exception(), ActorDiedError)

    def _lose(self, error: Exception) -> None:
        logger.warning("replica %s is lost and gets no more weights: %s", self.name, error)
        self.is_lost = True

    def _look_up(self) -> Any:
        self._actor = self._actor or _find(self.name)
        if self._actor is None:
            raise RayActorError
        return self._actor


def _find(name: str) -> Any:
    """The actor with this name; None if it died and Ray has forgotten it, and there is no new one yet."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


async def drain(weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]]) -> None:
    """Materialise and drop every tensor; making one is a collective of all ranks."""
    async for _ in ensure_async_iterator(weights):
        pass
