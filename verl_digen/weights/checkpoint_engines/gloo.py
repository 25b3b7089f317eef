# SPDX-License-Identifier: Apache-2.0
"""`digen_gloo`: buckets broadcast over gloo, in a separate process group; the default group is not used.

- The store listens on one address: loopback in a cluster of one node, else the sender's node address. gloo's own
  connections use each rank's address of the same kind.
- Bucket headers are JSON, so a peer cannot make the receiver run code.
"""

from __future__ import annotations

import asyncio
import socket
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
"""Timeout of the group; a receiver may wait for a sender that gathers a large model."""


@dataclass(frozen=True)
class Member:
    """A rank's state before an update."""

    generation: int
    """Generation of the rank's group; 0 if it has none."""
    address: tuple[str, int] | None
    """Host and port of the store, on the sender."""


@dataclass(frozen=True)
class MeetingPoint:
    """Store address and group generation of an update."""

    address: tuple[str, int]
    generation: int


class GlooEngine(BucketEngine):
    """See the module. The group is reused from update to update, and rebuilt when a rank is new."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        super().__init__(bucket_size, is_master)
        self._store: TCPStore | None = None
        self._address: tuple[str, int] | None = None
        self._generation = 0
        self._num_ranks = 0

    def prepare(self) -> Member:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Open the store once, on the sender -> this rank's state."""
        if self.is_master and self._store is None:
            host = _own_address()
            listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            port = listener.getsockname()[1]
            self._store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=listener.detach()
            )
            self._address = host, port
        return Member(self._generation, self._address)

    @classmethod
    def meet(cls, metadata: list[Member]) -> MeetingPoint:
        """The group that all ranks are already in, or a new generation."""
        generations = {member.generation for member in metadata}
        kept = len(generations) == 1 and generations != {0}
        address = metadata[SENDER].address
        assert address is not None, "the sender opened a store"
        return MeetingPoint(address, max(generations) + (0 if kept else 1))

    def init_process_group(self, rank: int, num_ranks: int, meeting_point: MeetingPoint) -> None:  # pyright: ignore
        """Join the group, unless the last update's group can be reused."""
        self.rank = rank
        is_current = (self._generation, self._num_ranks) == (meeting_point.generation, num_ranks)
        if rank == OUTSIDE or is_current:
            return
        if self._store is None:
            self._store = TCPStore(*meeting_point.address, is_master=False, timeout=TIMEOUT)
        name = f"{meeting_point.generation}-of-{num_ranks}"
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] - its stub lacks it
        options._devices = [ProcessGroupGloo.create_device(hostname=_own_address())]
        options._timeout = TIMEOUT
        self.channel = ProcessGroupGloo(PrefixStore(name, self._store), rank, num_ranks, options)
        self._generation, self._num_ranks = meeting_point.generation, num_ranks

    async def send(self, channel: Any, bucket: Bucket) -> None:
        header = torch.frombuffer(bytearray(bucket.header()), dtype=torch.uint8)
        sizes = torch.tensor([len(header), len(bucket.data)])
        await self._in_thread(_broadcast, channel, sizes, header, bucket.data)

    async def receive(self, channel: Any) -> Bucket:
        return await self._in_thread(_receive, channel)

    async def _in_thread(self, function: Callable[..., Any], group: Any, *args: Any) -> Any:
        """Call `function(group, *args)` in a thread; if it fails, leave the group, which closes its connections."""
        try:
            return await asyncio.to_thread(function, group, *args)
        except RuntimeError:
            if self.channel is group:
                self.channel, self._generation = None, 0
            raise


def _own_address() -> str:
    """Address that this process listens on: loopback, unless the cluster has other nodes."""
    return "127.0.0.1" if len(ray.nodes()) == 1 else ray.util.get_node_ip_address().strip("[]")


def _receive(group: Any) -> Bucket:
    sizes = torch.empty(2, dtype=torch.int64)
    _broadcast(group, sizes)
    header, data = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
    _broadcast(group, header, data)
    return Bucket.of(header.numpy().tobytes(), data)


def _broadcast(group: Any, *tensors: Tensor) -> None:
    for tensor in tensors:
        if len(tensor):  # gloo refuses empty tensors
            group.broadcast([tensor], BroadcastOptions()).wait()


CheckpointEngineRegistry.register("digen_gloo")(GlooEngine)  # pyright: ignore - verl's register is a static method
