# SPDX-License-Identifier: Apache-2.0
"""Sender of one weight update to one worker of a replica on the same node, for both back ends.

verl's `BucketedWeightSender`, with a bound on every wait. Without IPC, buckets lie in shared memory. With it, buckets
stay on the device:

- A replica that stages the update gets buckets of `update_weights_bucket_megabytes`: few, because the answer to each
  waits for the kernels that generate.
- One that loads it as it arrives gets a handle of each tensor larger than `DIRECT_MB`, which is not copied into a
  bucket, and buckets of that size with the others.

docs/weights.md counts the copies of each way.

Invariants (tests/weights/test_transfer.py): the receiver gets every tensor in the wire's dtype, bitwise; the sender
never waits for a dead receiver, nor for a silent one longer than its timeout.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import zmq
from torch import Tensor
from verl.utils.device import get_device_name
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.utils import ensure_async_iterator

from verl_digen.weights.bucketed import BoundedSocket, BucketedWeightSender
from verl_digen.weights.checksum import Checksum

DIRECT_MB = 16
"""Size above which a tensor that is loaded as it arrives is not copied into a bucket. Opening a handle costs about as
much time as copying so much."""


class ReceiverDied(RuntimeError):
    """The receiver's process ended while it received an update."""


@dataclass(frozen=True)
class Wire:
    """Connection to one worker for one update."""

    handle: str
    """zmq address, bound by the sender."""
    use_shm: bool
    """Buckets in shared memory; else they stay on the device, which both processes share."""
    is_live: bool
    """The worker loads each tensor as it arrives, and stages none."""
    dtype: torch.dtype
    """Dtype of all floating-point tensors on the wire."""
    max_bucket_mb: int
    """`actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes`."""
    timeout_s: float
    """`digen.rollout.update_timeout_s`."""

    @classmethod
    def of_run(cls, handle: str, rollout: Any, timeout_s: float, *, use_shm: bool, is_live: bool) -> "Wire":
        """Connection of a run, by verl's `rollout` config."""
        max_bucket_mb = rollout.checkpoint_engine.update_weights_bucket_megabytes
        return cls(handle, use_shm, is_live, PrecisionType.to_dtype(rollout.dtype), max_bucket_mb, timeout_s)

    @property
    def bucket_mb(self) -> int:
        """Size of a bucket; see the module."""
        return min(DIRECT_MB, self.max_bucket_mb) if self.is_live and not self.use_shm else self.max_bucket_mb


def bytes_beside_server(engine: Any) -> int:
    """Device memory that an update takes beside a server that stages it, by verl's section `checkpoint_engine`: the
    sender's bucket, and two of an engine that receives on the device."""
    num_buckets = 1 if engine.backend == "digen_gloo" else 3
    return num_buckets * engine.update_weights_bucket_megabytes << 20


class BoundedSender(BucketedWeightSender):
    """verl's sender on a `BoundedSocket`, whose waits call `check`; what that raises ends the update."""

    def __init__(self, wire: Wire, check: Callable[[], None]):
        super().__init__(wire.handle, wire.bucket_mb, wire.use_shm)
        self._timeout_s, self._check = wire.timeout_s, check

    def _init_socket(self) -> None:
        self.socket = BoundedSocket.open(self.zmq_context, zmq.REQ, check=self._check, timeout_s=self._timeout_s)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.zmq_handle)

    def _cleanup(self) -> None:
        try:
            super()._cleanup()
        except FileNotFoundError:  # shared memory goes with a receiver that is killed: its resource tracker unlinks it
            self.shm = None
            super()._cleanup()


async def send_update(
    weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]],
    wire: Wire,
    *,
    receiver: str,
    has_died: Callable[[], bool],
) -> Checksum:
    """Send all `weights` -> their checksum, computed on the device that the wire's tensors are on.

    ReceiverDied once `has_died()`, which is called while the event loop is blocked; the rest of `weights` is then not
    read. RuntimeError, which names the `receiver`, if it took no part for `wire.timeout_s`; ValueError if a tensor is
    larger than a bucket in shared memory.
    """

    def check() -> None:
        if has_died():
            raise ReceiverDied(f"{receiver} died while it received a weight update")

    total = Checksum()
    try:
        await BoundedSender(wire, check).async_send_weights(_on_the_wire(weights, wire, total))
    except TimeoutError as error:
        raise RuntimeError(
            f"{receiver} took no part of a weight update for digen.rollout.update_timeout_s={wire.timeout_s:g} s; it "
            "is dead or hung, or the limit is too low"
        ) from error
    return total


async def _on_the_wire(
    weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]], wire: Wire, total: Checksum
) -> AsyncIterator[tuple[str, Tensor]]:
    # a tensor from another pool may come over the host: on the device its checksum takes no time
    target: dict[str, Any] = {} if wire.use_shm else {"device": own_device()}
    async for name, tensor in ensure_async_iterator(weights):
        dtype = wire.dtype if tensor.is_floating_point() else tensor.dtype
        sent = tensor.detach().to(dtype=dtype, **target)
        if wire.use_shm and sent.nbytes > wire.bucket_mb << 20:
            raise ValueError(
                "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes must be at least "
                f"{-(-sent.nbytes >> 20)} for {name} {tuple(sent.shape)}, got {wire.max_bucket_mb}; a tensor must fit "
                "into a bucket where the platform has no IPC"
            )
        total.add(sent)
        yield name, sent


def own_device() -> torch.device:
    """The platform's current device, with its index unless it is the CPU: IPC opens handles by index."""
    name = get_device_name()
    return torch.device(name) if name == "cpu" else torch.device(name, torch.accelerator.current_device_index())
