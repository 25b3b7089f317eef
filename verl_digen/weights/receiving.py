# SPDX-License-Identifier: Apache-2.0
"""Receiver of one weight update in a replica's worker, for both back ends: a thread takes bucket after bucket.

The thread ends when the last bucket has arrived, no part arrived for `timeout_s`, or the update was cancelled
(`abandon`). verl's receiver, which does the transfer, has no timeout of its own.

Invariants (tests/weights/test_transfer.py): an update arrives whole or is an error; an abandoned one leaves no thread.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import zmq
from torch import Tensor

from verl_digen.weights.bucketed import BoundedSocket, BucketedWeightReceiver
from verl_digen.weights.checksum import Checksum, Manifest

STOP_S = 30.0
"""Timeout for the thread of a cancelled update, which may be copying a bucket."""

RECONNECT_MS = 1
"""Interval of tries to connect: the sender binds after the receiver has begun. zmq's 100 would be most of an update."""

Named = Sequence[tuple[str, Tensor]]
"""Tensors of an update, with their names."""
Take = Callable[[Named], None]
"""Takes one bucket of an update. Its tensors are valid during the call alone."""


class BoundedReceiver(BucketedWeightReceiver):
    """verl's receiver on a `BoundedSocket`."""

    def __init__(
        self, handle: str, device: torch.device, use_shm: bool, *, check: Callable[[], None], timeout_s: float
    ):
        super().__init__(handle, device, use_shm)
        self._check, self._timeout_s = check, timeout_s

    def _init_socket(self) -> None:
        self.socket = BoundedSocket.open(self.zmq_context, zmq.REP, check=self._check, timeout_s=self._timeout_s)
        self.socket.setsockopt(zmq.LINGER, round(self._timeout_s * 1000))  # deliver the last answer before closing
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.connect(self.zmq_handle)


class Receiving:
    """One update that is received.

    `handle` is the address of verl's zmq socket, which the sender binds; `device` has its index unless it is the CPU.
    `take` is called in the thread, on a stream of its own. `timeout_s` bounds the wait for the next part.

    Example:
        receiving = Receiving(handle, device, update.take, use_shm=True, timeout_s=600)
        ... the sender sends ...
        receiving.finish(manifest)   # the update is complete, and what was sent
        receiving.abandon()          # instead: the sender was lost, and a new update starts
    """

    def __init__(self, handle: str, device: torch.device, take: Take, *, use_shm: bool, timeout_s: float):
        self._device, self._take, self._timeout_s = device, take, timeout_s
        self._abandoned = threading.Event()
        self._receiver = BoundedReceiver(handle, device, use_shm, check=self._check, timeout_s=timeout_s)
        self._checksum = Checksum()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="receive-weights", daemon=True)
        self._thread.start()

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise RuntimeError("the update was abandoned for a newer one")

    def _run(self) -> None:
        try:
            with torch.no_grad(), _own_stream(self._device):
                self._receiver.receive_weights(self._on_bucket)
        except BaseException as error:  # raised again by `arrived`, in the caller's thread
            self._error = self._error or error

    def _on_bucket(self, named_tensors: list[tuple[str, Tensor]], is_last: bool) -> None:
        """Take a bucket. After an error the rest is answered and dropped: the sender ends, and `arrived` raises."""
        if self._error is not None:
            return
        try:
            for _, tensor in named_tensors:
                self._checksum.add(tensor)
            self._take(named_tensors)
        except Exception as error:
            # without its frames: they hold views of the bucket, which must be closed
            self._error = error.with_traceback(None)

    def arrived(self) -> Checksum:
        """Wait for the last bucket. RuntimeError if it did not arrive, or `take` refused a tensor; the message says
        why."""
        while self._thread.is_alive():  # each wait of the thread is bounded, so this one is
            self._thread.join(self._timeout_s)
        if self._error is not None:
            raise RuntimeError(f"an update could not be received: {self._error}") from self._error
        return self._checksum

    def finish(self, manifest: Manifest) -> None:
        """Wait for the last bucket. RuntimeError as `arrived`, or if the update is not what was sent."""
        arrived = self.arrived()
        if (arrived.num_tensors, arrived.value) != (manifest.num_tensors, manifest.checksum):
            raise RuntimeError(
                f"{manifest.num_tensors} tensors with checksum {manifest.checksum:x} were sent, but "
                f"{arrived.num_tensors} with checksum {arrived.value:x} arrived"
            )

    def abandon(self) -> None:
        """Cancel the update: end the thread. RuntimeError if it does not end."""
        self._abandoned.set()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the receiver of an abandoned weight update did not stop within {STOP_S:g} s")


def _own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Context of a thread that uses `device` beside others: its own stream there, so that copies wait for no kernel."""
    if device.type == "cpu":
        return nullcontext()
    torch.accelerator.set_device_index(device.index)
    return torch.Stream(device)
