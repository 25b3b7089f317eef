# SPDX-License-Identifier: Apache-2.0
"""`digen_gloo`: buckets broadcast over gloo, in a process group of their own; the default group is left alone."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage] - public, says its doc
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from verl_digen.weights.buckets import Bucket
from verl_digen.weights.checkpoint_engines.base import OUTSIDE, SENDER, BucketEngine

TIMEOUT = timedelta(minutes=30)
"""A receiver may wait for a sender that gathers a large model."""


@dataclass(frozen=True)
class Member:
    """What a rank says of itself before an update."""

    generation: int
    """Of the group it is in; 0 in none."""
    address: tuple[str, int] | None
    """Host and port of the store, on the sender."""


@dataclass(frozen=True)
class MeetingPoint:
    """The group of an update."""

    address: tuple[str, int]
    generation: int


class GlooEngine(BucketEngine):
    """See the module. The group is kept from update to update, and made again when a rank is new."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        super().__init__(bucket_size, is_master)
        self._store: TCPStore | None = None
        self._address: tuple[str, int] | None = None
        self._generation = 0
        self._num_ranks = 0

    def prepare(self) -> Member:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The sender opens the store once."""
        if self.is_master and self._store is None:
            host = ray.util.get_node_ip_address().strip("[]")
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
            self._address = host, self._store.port
        return Member(self._generation, self._address)

    @classmethod
    def meet(cls, metadata: list[Member]) -> MeetingPoint:
        """A generation that all are in already, or a new one."""
        generations = {member.generation for member in metadata}
        kept = len(generations) == 1 and generations != {0}
        address = metadata[SENDER].address
        assert address is not None, "the sender opened a store"
        return MeetingPoint(address, max(generations) + (0 if kept else 1))

    def init_process_group(self, rank: int, num_ranks: int, meeting_point: MeetingPoint) -> None:  # pyright: ignore
        """Join the others, unless the group of the last update will do."""
        self.rank = rank
        is_current = (self._generation, self._num_ranks) == (meeting_point.generation, num_ranks)
        if rank == OUTSIDE or is_current:
            return
        if self._store is None:
            self._store = TCPStore(*meeting_point.address, is_master=False, timeout=TIMEOUT)
        name = f"{meeting_point.generation}-of-{num_ranks}"
        self.channel = ProcessGroupGloo(PrefixStore(name, self._store), rank, num_ranks, TIMEOUT)
        self._generation, self._num_ranks = meeting_point.generation, num_ranks

    async def send(self, channel: Any, bucket: Bucket) -> None:
        header = torch.frombuffer(bytearray(pickle.dumps((bucket.parts, bucket.is_last))), dtype=torch.uint8)
        sizes = torch.tensor([len(header), len(bucket.data)])
        await self._in_thread(_broadcast, channel, sizes, header, bucket.data)

    async def receive(self, channel: Any) -> Bucket:
        return await self._in_thread(_receive, channel)

    async def _in_thread(self, function: Callable[..., Any], group: Any, *args: Any) -> Any:
        """Call it with the group; if it fails, the group is left, which closes its connections."""
        try:
            return await asyncio.to_thread(function, group, *args)
        except RuntimeError:
            if self.channel is group:
                self.channel, self._generation = None, 0
            raise


def _receive(group: Any) -> Bucket:
    sizes = torch.empty(2, dtype=torch.int64)
    _broadcast(group, sizes)
    header, data = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
    _broadcast(group, header, data)
    parts, is_last = pickle.loads(header.numpy().tobytes())
    return Bucket(parts, data, is_last)


def _broadcast(group: Any, *tensors: Tensor) -> None:
    for tensor in tensors:
        if len(tensor):  # gloo takes no empty ones
            group.broadcast([tensor], BroadcastOptions()).wait()


CheckpointEngineRegistry.register("digen_gloo")(GlooEngine)  # pyright: ignore - verl's register is a static method
