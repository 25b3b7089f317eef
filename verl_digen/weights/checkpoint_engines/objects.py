# SPDX-License-Identifier: Apache-2.0
"""`digen_ray`: buckets as Ray objects (shared memory on one node), handed over through a mailbox actor.

Bound: `MAX_BUCKETS` buckets exist; the sender waits for the slowest receiver.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from verl_digen.weights.buckets import Bucket
from verl_digen.weights.checkpoint_engines.base import OUTSIDE, BucketEngine

MAX_BUCKETS = 2
"""One is sent while one is received."""


class Mailbox:
    """Keeps references to the buckets on their way; every receiver takes each once, in order."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[Any]] = {}
        self._num_taken: dict[int, int] = {}
        self._num_receivers = 0
        self._next = 0
        self._changed = asyncio.Condition()

    async def open(self, num_receivers: int) -> int:
        """Start an update for so many receivers -> number of its first bucket."""
        async with self._changed:
            self._num_receivers = num_receivers
            self._buckets.clear()
            self._num_taken.clear()
            return self._next

    async def post(self, references: list[Any]) -> None:
        """Hand over the next bucket (a list of one reference); returns when there is room for another."""
        async with self._changed:
            self._buckets[self._next] = references
            self._num_taken[self._next] = 0
            self._next += 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: len(self._buckets) < MAX_BUCKETS)

    async def take(self, number: int) -> list[Any]:
        """The bucket `number`, when it is there."""
        async with self._changed:
            await self._changed.wait_for(lambda: number in self._buckets)
            return self._buckets[number]

    async def done(self, number: int) -> None:
        """A receiver has bucket `number` in its own memory."""
        async with self._changed:
            self._num_taken[number] += 1
            if self._num_taken[number] == self._num_receivers:
                del self._buckets[number], self._num_taken[number]
                self._changed.notify_all()


class RayObjectEngine(BucketEngine):
    """See the module. The mailbox lives as long as the sender."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        super().__init__(bucket_size, is_master)
        self._mailbox: Any = None
        self._next: Any = 0

    def prepare(self) -> Any:
        """On the sender: make the mailbox once, open it for an update by `init_process_group`."""
        if self.is_master and self._mailbox is None:
            self._mailbox = ray.remote(Mailbox).options(num_cpus=0).remote()
        return self._mailbox

    @classmethod
    def meet(cls, metadata: list[Any]) -> Any:
        """The mailbox."""
        return metadata[0]

    def init_process_group(self, rank: int, num_ranks: int, meeting_point: Any) -> None:  # pyright: ignore
        self.rank = rank
        if rank == OUTSIDE:
            return
        self._mailbox = meeting_point
        self._next = ray.get(self._mailbox.open.remote(num_ranks - 1))

    async def send(self, bucket: Bucket) -> None:
        await self._mailbox.post.remote([ray.put(bucket)])

    async def receive(self) -> Bucket:
        (reference,) = await self._mailbox.take.remote(self._next)
        bucket: Bucket = await reference
        bucket = Bucket(bucket.parts, bucket.data.clone(), bucket.is_last)
        await self._mailbox.done.remote(self._next)
        self._next += 1
        return bucket


CheckpointEngineRegistry.register("digen_ray")(RayObjectEngine)  # pyright: ignore - verl's register is a static method
