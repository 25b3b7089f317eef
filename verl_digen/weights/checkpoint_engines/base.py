# SPDX-License-Identifier: Apache-2.0
"""Base of the checkpoint engines: ranks of an update, and transfer in buckets.

An update fails if a member dies. The caller then starts another one with the remaining members. For that to work

- the sender still materialises the remaining tensors, because each is a collective of the trainer's ranks;
- a failed rank closes its channel so that others do not block on it; a stale update is cancelled when the next starts.

Invariant (tests/weights/test_checkpoint_engines.py): the update after one in which a receiver died reaches the others.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Any

from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine

from verl_digen.weights.buckets import Bucket, from_buckets, to_buckets

SENDER = 0
"""Rank of the sender: the trainer's rank 0. Replicas' workers follow; other trainer ranks have `OUTSIDE`."""
OUTSIDE = -1


class BucketEngine(CheckpointEngine):
    """One sender, any number of receivers. Constructor and methods are verl's.

    Args:
        bucket_size: bytes.
        is_master: True on the trainer's rank 0.
    """

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.rank = OUTSIDE
        self.channel: Any = None
        """Channel of the current update; set by `init_process_group`."""

    @classmethod
    def build_topology(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group` (rank, number of ranks, meeting point), for the trainer's ranks and for the
        replicas' workers.

        Args:
            metadata: results of `prepare`, from the trainer's ranks and then from the replicas' workers.
        """
        meeting_point = cls.meet([metadata[0], *metadata[actor_wg_world_size:]])

        def shared(count: int) -> dict[str, list[Any]]:
            return {"num_ranks": [rollout_world_size + 1] * count, "meeting_point": [meeting_point] * count}

        senders = [SENDER] + [OUTSIDE] * (actor_wg_world_size - 1)
        receivers = list(range(SENDER + 1, SENDER + 1 + rollout_world_size))
        return {"rank": senders, **shared(actor_wg_world_size)}, {"rank": receivers, **shared(rollout_world_size)}

    def finalize(self) -> None:
        """No-op: connections are kept for the next update."""

    async def send_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Send all `weights`; `OUTSIDE` ranks only materialise each tensor, which is a collective.

        At most two buckets exist: one is sent while the next is filled.
        """
        if self.rank == OUTSIDE:
            for _ in weights:
                pass
            return {}
        channel = self.channel  # a later update has its own
        sending: asyncio.Future[None] | None = None
        try:
            async for bucket in to_buckets(weights, self.bucket_size):
                if sending is not None:
                    await sending
                sending = asyncio.ensure_future(self.send(channel, bucket))
                await asyncio.sleep(0)  # it starts now: making the next tensors blocks the event loop
            if sending is not None:
                await sending
        finally:
            for _ in weights:
                pass
            if sending is not None:
                await asyncio.wait([sending])
            # an error's traceback holds this frame: without the task, whose error it is, it is no circle, and a channel
            # that failed is closed at once
            sending = channel = None
        return {}

    async def receive_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Receive the sender's tensors, in its order."""
        async for named in from_buckets(self._buckets(), self.bucket_size):
            yield named

    async def _buckets(self) -> AsyncIterator[Bucket]:
        """At most two buckets exist: one is received while the caller takes the one before."""
        channel = self.channel
        receiving: asyncio.Future[Bucket] | None = asyncio.ensure_future(self.receive(channel))
        try:
            while receiving is not None:
                bucket = await receiving
                receiving = None if bucket.is_last else asyncio.ensure_future(self.receive(channel))
                await asyncio.sleep(0)  # it starts now: the caller may block the event loop
                yield bucket
        finally:
            if receiving is not None:
                receiving.cancel()
            receiving = channel = None  # as in `send_weights`

    @classmethod
    @abstractmethod
    def meet(cls, metadata: list[Any]) -> Any:
        """Meeting point of the ranks, from their results of `prepare`, by rank."""

    @abstractmethod
    async def send(self, channel: Any, bucket: Bucket) -> None:
        """Send a bucket to all receivers."""

    @abstractmethod
    async def receive(self, channel: Any) -> Bucket:
        """Receive the next bucket."""
