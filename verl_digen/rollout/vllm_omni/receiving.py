# SPDX-License-Identifier: Apache-2.0
"""Receiver of one weight update in a worker: a thread receives the buckets into host memory.

The thread ends when the last bucket has arrived, no part arrived for `timeout_s`, or the update was cancelled
(`abandon`). verl's receiver, which does the transfer, has no timeout of its own.

Example:
    receiving = Receiving(handle, device, networks=model.experts, use_shm=True, timeout_s=600)
    ... the sender sends ...
    receiving.result()      # the tensors and their checksum
    receiving.abandon()     # instead: the sender was lost, and a new update starts
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zmq
from torch import Tensor
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

from verl_digen.weights.checksum import Checksum, DecidingChecksums

POLL_MS = 50
"""Interval between checks for cancellation."""
STOP_S = 30.0
"""Timeout for the thread of a cancelled update, which may be copying a bucket."""


class Abandoned(RuntimeError):
    """The update was cancelled before its last bucket arrived."""


@dataclass(frozen=True)
class Staged:
    """A received update."""

    tensors: dict[str, Tensor]
    """Tensors as they were sent, on the CPU."""
    checksum: int
    """`verl_digen.weights.checksum` of the tensors."""
    deciding_checksums: tuple[int, ...]
    """`verl_digen.weights.probe.Probe.checksums` of the tensors."""


class BoundedSocket(zmq.Socket):
    """A socket whose `recv` raises when the update is cancelled, or when nothing arrived for `timeout_s`."""

    abandoned: threading.Event
    timeout_s: float

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        deadline_s = time.monotonic() + self.timeout_s
        while not self.poll(POLL_MS):
            if self.abandoned.is_set():
                raise Abandoned("the update was abandoned for a newer one")
            if time.monotonic() >= deadline_s:
                raise TimeoutError(
                    f"no part of it came for {self.timeout_s:g} s; if the sender was only slow, raise "
                    "digen.rollout.update_timeout_s"
                )
        return super().recv(*args, **kwargs)


class BoundedReceiver(BucketedWeightReceiver):
    """verl's receiver on a `BoundedSocket`."""

    def __init__(
        self, handle: str, device: torch.device, use_shm: bool, *, abandoned: threading.Event, timeout_s: float
    ):
        super().__init__(handle, device, use_shm)
        self._abandoned, self._timeout_s = abandoned, timeout_s

    def _init_socket(self) -> None:
        self.socket = self.zmq_context.socket(zmq.REP, socket_class=BoundedSocket)
        self.socket.abandoned, self.socket.timeout_s = self._abandoned, self._timeout_s
        self.socket.setsockopt(zmq.LINGER, round(self._timeout_s * 1000))  # deliver the last answer before closing
        self.socket.connect(self.zmq_handle)


class Receiving:
    """See the module.

    Args:
        handle: address of verl's zmq socket; the sender binds it.
        device: the worker's device, for buckets that are shared on it.
        networks: names of the networks that the update is for, in order (`DiffusionModel.experts`).
        use_shm: True if buckets come through shared memory.
        timeout_s: timeout for the next part.
    """

    def __init__(self, handle: str, device: torch.device, *, networks: Sequence[str], use_shm: bool, timeout_s: float):
        self._abandoned = threading.Event()
        self._timeout_s = timeout_s
        self._receiver = BoundedReceiver(handle, device, use_shm, abandoned=self._abandoned, timeout_s=timeout_s)
        self._tensors: dict[str, Tensor] = {}
        self._deciding, self._rest = DecidingChecksums(networks), Checksum()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="receive-weights", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        def stage(named_tensors: list[tuple[str, Tensor]], is_last: bool) -> None:
            # copied: the sender reuses the bucket
            self._tensors.update({name: tensor.to("cpu", copy=True) for name, tensor in named_tensors})

        try:
            self._receiver.receive_weights(stage)
            for name, tensor in self._tensors.items():
                if not self._deciding.add(name, tensor):
                    self._rest.add(tensor)
        except BaseException as error:  # raised again by `result`, in the caller's thread
            self._error = error

    def result(self) -> Staged:
        """Wait for the last bucket.

        Raises:
            RuntimeError: the update did not arrive; the message says why.
        """
        while self._thread.is_alive():  # each wait of the thread is bounded, so this one is
            self._thread.join(self._timeout_s)
        if self._error is not None:
            raise RuntimeError(f"an update could not be received: {self._error}") from self._error
        deciding = self._deciding.values
        return Staged(self._tensors, (sum(deciding) + self._rest.value) % 2**64, deciding)

    def abandon(self) -> None:
        """Cancel the update: end the thread and drop the received tensors.

        Raises:
            RuntimeError: the thread does not end.
        """
        self._abandoned.set()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the receiver of an abandoned weight update did not stop within {STOP_S:g} s")
