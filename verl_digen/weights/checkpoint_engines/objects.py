# SPDX-License-Identifier: Apache-2.0
"""`digen_ray`: buckets as Ray objects (shared memory on one node), passed through a mailbox actor.

Bound: at most `MAX_BUCKETS` buckets exist; the sender waits for the slowest receiver.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from verl_digen.weights.buckets import Bucket
from verl_digen.weights.checkpoint_engines.base import OUTSIDE, BucketEngine

MAX_BUCKETS = 2
"""Maximum number of buckets: one is sent while one is received."""


class Mailbox:
    """Holds references to the buckets in flight; every receiver takes each once, in order."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[Any]] = {}
        self._num_taken: dict[int, int] = {}
        self._num_receivers = 0
        self._update = 0
        self._next = 0
        self._changed = asyncio.Condition()

    async def begin(self, update: int) -> None:
        """Begin a new update; calls that still wait in an older one raise."""
        async with self._changed:
            self._update = update
            self._buckets.clear()
            self._num_taken.clear()
            self._changed.notify_all()

    async def open(self, num_receivers: int) -> int:
        """Join the update, which has `num_receivers` -> number of its first bucket."""
        self._num_receivers = num_receivers
        return self._next

    async def post(self, update: int, references: list[Any]) -> None:
        """Add the next bucket (a list of one reference); returns when there is room for another."""
        async with self._changed:
            self._require_current(update)
            self._buckets[self._next] = references
            self._num_taken[self._next] = 0
            self._next += 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._update != update or len(self._buckets) < MAX_BUCKETS)
            self._require_current(update)

    async def take(self, update: int, number: int) -> list[Any]:
        """Wait for bucket `number` and return it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._update != update or number in self._buckets)
            self._require_current(update)
            return self._buckets[number]

    async def done(self, update: int, number: int) -> None:
        """Report that a receiver has copied bucket `number` into its own memory."""
        async with self._changed:
            self._require_current(update)
            self._num_taken[number] += 1
            if self._num_taken[number] == self._num_receivers:
                del self._buckets[number], self._num_taken[number]
                self._changed.notify_all()

    def _require_current(self, update: int) -> None:
        if update != self._update:
            raise RuntimeError(f"weight update {update} was given up, because a replica died; {self._update} has begun")


@dataclass
class Channel:
    """One rank's view of one update."""

    mailbox: Any
    update: int
    next: int
    """Number of the next bucket to receive."""


class RayObjectEngine(BucketEngine):
    """See the module. The mailbox lives as long as the sender."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        super().__init__(bucket_size, is_master)
        self._mailbox: Any = None
        self._update = 0

    def prepare(self) -> Any:
        """On the sender: create the mailbox once and begin an update in it -> (mailbox, update number). Else None."""
        if not self.is_master:
            return None
        if self._mailbox is None:
            self._mailbox = ray.remote(Mailbox).options(num_cpus=0).remote()
        self._update += 1
        ray.get(self._mailbox.begin.remote(self._update))
        return self._mailbox, self._update

    @classmethod
    def meet(cls, metadata: list[Any]) -> Any:
        """The sender's (mailbox, update number)."""
        return metadata[0]

    def init_process_group(self, rank: int, num_ranks: int, meeting_point: Any) -> None:  # pyright: ignore
        self.rank = rank
        if rank == OUTSIDE:
            return
        mailbox, update = meeting_point
        self.channel = Channel(mailbox, update, ray.get(mailbox.open.remote(num_ranks - 1)))

    async def send(self, channel: Channel, bucket: Bucket) -> None:
        # as an array: Ray copies its bytes into shared memory once, and pickles none
        reference = ray.put((bucket.header(), bucket.data.numpy()))
        await channel.mailbox.post.remote(channel.update, [reference])

    async def receive(self, channel: Channel) -> Bucket:
        (reference,) = await channel.mailbox.take.remote(channel.update, channel.next)
        header, data = await reference
        bucket = Bucket.of(header, torch.tensor(data))  # copied: the array lies in Ray's memory, which is given back
        await channel.mailbox.done.remote(channel.update, channel.next)
        channel.next += 1
        return bucket


CheckpointEngineRegistry.register("digen_ray")(RayObjectEngine)  # pyright: ignore - verl's register is a static method
