# SPDX-License-Identifier: Apache-2.0
"""`rollout.checkpoint_engine.backend=digen_gloo`: weight transfer between device pools without NCCL, as a checkpoint
engine of verl. Buckets are broadcast over gloo, through host memory, in a process group of its own.

- The store listens on one address: loopback in a cluster of one node, else the sender's node address. gloo's own
  connections use each rank's address of the same kind.
- Each number is copied once on the way in, from its device straight into the bucket, which is page-locked if the device
  is an accelerator; and not at all on the way out, unless its tensor was larger than a bucket and split.
- Bucket headers are JSON, so a peer cannot make the receiver run code.

An update fails if a member dies. The caller then starts another one with the remaining members. For that to work, the
sender still materialises the remaining tensors, because each is a collective of the trainer's ranks, and a failed rank
closes its channel so that others do not block on it. With verl's `nccl` such an update ends at
`digen.deadlines.train_s`, and the run with it.

Invariant (tests/weights/test_gloo.py): the update after one in which a receiver died reaches the others.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage] - public, says its doc
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)


@dataclass(frozen=True)
class Bucket:
    """Part of an update."""

    parts: tuple[TensorMeta, ...]
    """Tensors, or pieces of them, in `data`, in order, each at its `offset`."""
    data: Tensor
    """uint8 [num_bytes], on the CPU; may be part of a larger allocation."""
    is_last: bool

    def header(self) -> bytes:
        """All fields except `data`, as JSON."""
        plain = [{**vars(part), "shape": list(part.shape), "dtype": str(part.dtype)} for part in self.parts]
        return json.dumps([plain, self.is_last]).encode()

    @classmethod
    def of(cls, header: bytes, data: Tensor) -> "Bucket":
        """Inverse of `header`."""
        plain, is_last = json.loads(header)
        parts = (
            TensorMeta(**{**part, "shape": torch.Size(part["shape"]), "dtype": _DTYPES[part["dtype"]]})
            for part in plain
        )
        return cls(tuple(parts), data, is_last)


ALIGNMENT_BYTES = 16
"""Each piece starts at a multiple of it, so that a piece can be read as numbers where it lies."""
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


async def to_buckets(
    weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]], bucket_bytes: int
) -> AsyncIterator[Bucket]:
    """Fill buckets of at most `bucket_bytes`; the last one has `is_last`."""
    parts: list[TensorMeta] = []
    data = torch.empty(0, dtype=torch.uint8)
    num_bytes = 0
    device = torch.device("cpu")
    async for part, piece in split_weight_chunks(weights, bucket_bytes):  # type: ignore[arg-type]
        assert piece is not None
        device = piece.device
        if num_bytes + part.chunk_size > bucket_bytes:
            _wait_for_copies(device)
            yield Bucket(tuple(parts), data[:num_bytes], is_last=False)
            parts, num_bytes = [], 0
        if not parts:
            data = torch.empty(bucket_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
        part.offset = num_bytes
        parts.append(part)
        data[num_bytes : num_bytes + part.chunk_size].copy_(piece, non_blocking=True)
        num_bytes = _aligned(num_bytes + part.chunk_size)
    _wait_for_copies(device)
    yield Bucket(tuple(parts), data[:num_bytes], is_last=True)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _wait_for_copies(device: torch.device) -> None:
    """Return when a bucket that was filled from `device` may be read."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


async def from_buckets(buckets: AsyncIterator[Bucket], bucket_bytes: int) -> AsyncIterator[tuple[str, Tensor]]:
    """Inverse of `to_buckets`."""

    async def parts() -> AsyncIterator[tuple[TensorMeta, Tensor]]:
        async for bucket in buckets:
            for part in bucket.parts:
                yield part, bucket.data[part.offset : part.offset + part.chunk_size]

    async for named in merge_weight_chunks(parts(), bucket_bytes):  # type: ignore[arg-type]
        yield named


SENDER = 0
"""Rank of the sender: the trainer's rank 0. Replicas' workers follow; other trainer ranks have `OUTSIDE`."""
OUTSIDE = -1
TIMEOUT = timedelta(minutes=30)
"""Timeout of the group; a receiver may wait for a sender that gathers a large model."""


@dataclass(frozen=True)
class MeetingPoint:
    """Store and group of an update; before it, what one rank knows of them."""

    generation: int
    """Generation of the group, from 1; 0 before the first, negative if the rank has left it."""
    address: tuple[str, int] | None
    """Host and port of the store; only the sender knows it before the update."""

    @classmethod
    def of(cls, known: "list[MeetingPoint]") -> "MeetingPoint":
        """The group that all ranks, the sender first, are already in, or a new generation."""
        generations = {one.generation for one in known}
        kept = len(generations) == 1 and min(generations) > 0
        newest = max(map(abs, generations))  # the store still has the addresses of a group that all have left
        return cls(newest if kept else newest + 1, known[SENDER].address)


class GlooEngine(CheckpointEngine):
    """One sender, any number of receivers. Constructor and methods are verl's: `bucket_size` is in bytes, `is_master`
    True on the trainer's rank 0. The group is reused from update to update, and rebuilt when a rank is new."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.rank = OUTSIDE
        self._group: ProcessGroupGloo | None = None
        self._store: TCPStore | None = None
        self._address: tuple[str, int] | None = None
        self._generation = 0
        self._num_ranks = 0

    def prepare(self) -> MeetingPoint:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Open the store once, on the sender -> this rank's state."""
        if self.is_master and self._store is None:
            host = _own_address()
            self._store = open_store(host, 0)
            self._address = host, self._store.port
        return MeetingPoint(self._generation, self._address)

    @classmethod
    def build_topology(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[MeetingPoint]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group` (rank, number of ranks, meeting point), for the trainer's ranks and for the
        replicas' workers, from the results of `prepare` in the same order."""
        meeting_point = MeetingPoint.of([metadata[0], *metadata[actor_wg_world_size:]])

        def shared(count: int) -> dict[str, list[Any]]:
            return {"num_ranks": [rollout_world_size + 1] * count, "meeting_point": [meeting_point] * count}

        senders = [SENDER] + [OUTSIDE] * (actor_wg_world_size - 1)
        receivers = list(range(SENDER + 1, SENDER + 1 + rollout_world_size))
        return {"rank": senders, **shared(actor_wg_world_size)}, {"rank": receivers, **shared(rollout_world_size)}

    def init_process_group(self, rank: int, num_ranks: int, meeting_point: MeetingPoint) -> None:  # pyright: ignore
        """Join the group, unless the last update's group can be reused."""
        self.rank = rank
        is_current = (self._generation, self._num_ranks) == (meeting_point.generation, num_ranks)
        if rank == OUTSIDE or is_current:
            return
        if self._store is None:
            assert meeting_point.address is not None, "the sender opened a store"
            self._store = TCPStore(*meeting_point.address, is_master=False, timeout=TIMEOUT)
        name = f"{meeting_point.generation}-of-{num_ranks}"
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] - its stub lacks it
        options._devices = [ProcessGroupGloo.create_device(hostname=_own_address())]
        options._timeout = TIMEOUT
        self._group = ProcessGroupGloo(PrefixStore(name, self._store), rank, num_ranks, options)
        self._generation, self._num_ranks = meeting_point.generation, num_ranks

    def finalize(self) -> None:
        """No-op: connections are kept for the next update."""

    async def send_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Send all `weights`; `OUTSIDE` ranks only materialise each tensor, which is a collective. At most two buckets
        exist: one is sent while the next is filled."""
        if self.rank == OUTSIDE:
            for _ in weights:
                pass
            return {}
        group = self._group  # a later update may have another one
        sending: asyncio.Future[None] | None = None
        try:
            async for bucket in to_buckets(weights, self.bucket_size):
                if sending is not None:
                    await sending
                sending = asyncio.ensure_future(asyncio.to_thread(_send, group, bucket))
                await asyncio.sleep(0)  # it starts now: making the next tensors blocks the event loop
            if sending is not None:
                await sending
        except BaseException:
            self._leave(group)
            raise
        finally:
            for _ in weights:
                pass
            if sending is not None:
                await asyncio.wait([sending])
            # an error's traceback holds this frame: without the task, whose error it is, it is no circle, and a group
            # that failed is closed at once
            sending = group = None
        return {}

    async def receive_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Receive the sender's tensors, in its order."""
        async for named in from_buckets(self._buckets(), self.bucket_size):
            yield named

    async def _buckets(self) -> AsyncIterator[Bucket]:
        """At most two buckets exist: one is received while the caller takes the one before."""
        group = self._group
        receiving: asyncio.Future[Bucket] | None = asyncio.ensure_future(asyncio.to_thread(_receive, group))
        try:
            while receiving is not None:
                bucket = await receiving
                receiving = None if bucket.is_last else asyncio.ensure_future(asyncio.to_thread(_receive, group))
                await asyncio.sleep(0)  # it starts now: the caller may block the event loop
                yield bucket
        finally:
            if receiving is not None:  # a call failed, or the caller takes no more
                receiving.cancel()
                self._leave(group)
            receiving = group = None  # as in `send_weights`

    def _leave(self, group: Any) -> None:
        """Leave the group of an update that did not come to its end, which closes its connections."""
        if self._group is group:
            self._group, self._generation = None, -abs(self._generation)


def open_store(host: str, port: int) -> TCPStore:
    """A store that listens on one address of this machine, where PyTorch's listens on all. Port 0: a free one."""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=listener.detach()
    )


def _own_address() -> str:
    """Address that this process listens on: loopback, unless the cluster has other nodes."""
    return "127.0.0.1" if len(ray.nodes()) == 1 else ray.util.get_node_ip_address().strip("[]")


def _send(group: Any, bucket: Bucket) -> None:
    header = torch.frombuffer(bytearray(bucket.header()), dtype=torch.uint8)
    sizes = torch.tensor([len(header), len(bucket.data)])
    _broadcast(group, sizes, header, bucket.data)


def _receive(group: Any) -> Bucket:
    sizes = torch.empty(2, dtype=torch.int64)
    _broadcast(group, sizes)
    header, data = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
    _broadcast(group, header, data)
    return Bucket.of(header.numpy().tobytes(), data)


def _broadcast(group: Any, *tensors: Tensor) -> None:
    for tensor in tensors:
        group.broadcast([tensor], BroadcastOptions()).wait()


CheckpointEngineRegistry.register("digen_gloo")(GlooEngine)  # pyright: ignore - verl's register is a static method
