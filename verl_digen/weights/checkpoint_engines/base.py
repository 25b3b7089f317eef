# SPDX-License-Identifier: Apache-2.0
"""What the engines share: who takes part, and buckets in between."""

from __future__ import annotations

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

    @classmethod
    def build_topology(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Everyone gets its rank, the number of those who take part, and where they meet.

        Args:
            metadata: what `prepare` returned, of the trainer's ranks and then of the replicas' workers.
        """
        meeting_point = cls.meet([metadata[0], *metadata[actor_wg_world_size:]])

        def shared(count: int) -> dict[str, list[Any]]:
            return {"num_ranks": [rollout_world_size + 1] * count, "meeting_point": [meeting_point] * count}

        senders = [SENDER] + [OUTSIDE] * (actor_wg_world_size - 1)
        receivers = list(range(SENDER + 1, SENDER + 1 + rollout_world_size))
        return {"rank": senders, **shared(actor_wg_world_size)}, {"rank": receivers, **shared(rollout_world_size)}

    def finalize(self) -> None:
        """Connections are kept for the next update."""

    async def send_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Send all `weights`; ranks outside only take part in making each tensor, which is a collective."""
        if self.rank == OUTSIDE:
            for _ in weights:
                pass
            return {}
        async for bucket in to_buckets(weights, self.bucket_size):
            await self.send(bucket)
        return {}

    async def receive_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """The tensors the sender sends, in its order."""
        async for named in from_buckets(self._buckets(), self.bucket_size):
            yield named

    async def _buckets(self) -> AsyncIterator[Bucket]:
        while True:
            bucket = await self.receive()
            yield bucket
            if bucket.is_last:
                return

    @classmethod
    @abstractmethod
    def meet(cls, metadata: list[Any]) -> Any:
        """What the ranks need to find each other, from what `prepare` returned on each of them, by rank."""

    @abstractmethod
    async def send(self, bucket: Bucket) -> None:
        """To all receivers."""

    @abstractmethod
    async def receive(self) -> Bucket:
        """The next bucket."""
