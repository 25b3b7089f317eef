# SPDX-License-Identifier: Apache-2.0
"""Bytes that one update moves, counted copy by copy: the numbers of docs/weights.md, in units of the update's size.

Sender, receiver and their buckets are the real ones. The CPU stands for the device, and a socket in this process for
the one that handles of device memory travel through; so a copy's kind follows from who makes it.
"""

import asyncio
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from verl_digen.weights.checksum import Checksum, checksum
from verl_digen.weights.receiver import WeightReceiver
from verl_digen.weights.sending import DIRECT_MB, BoundedSender, Wire, _on_the_wire

CPU = torch.device("cpu")
ATEN = torch.ops.aten
COPIES = (ATEN.copy_.default, ATEN._to_copy.default, ATEN.clone.default, ATEN.cat.default)
"""Operators that copy numbers."""
LARGE = (DIRECT_MB << 20) // 2 + 1
"""bf16 numbers of a tensor just too large for a bucket of a live update."""


class Copies(TorchDispatchMode):
    """Bytes that copies write, by the name of the part that is `at` work."""

    def __init__(self):
        super().__init__()
        self.num_bytes = Counter()
        self.at = ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in COPIES:
            self.num_bytes[self.at] += result.nbytes
        return result


class Loopback:
    """zmq's socket, with the receiver's side behind it."""

    def __init__(self, copies, take):
        self._copies, self._take, self.num_messages = copies, take, 0
        self.buffer = None

    def send_pyobj(self, message):
        self.num_messages += 1
        bucket = []
        for name, meta in message["bucket_meta"].items():
            if meta["handle"] is not None:
                rebuild, arguments = meta["handle"]
                bucket.append((name, rebuild(*arguments)))
                continue
            size = meta["dtype"].itemsize * meta["shape"].numel()
            data = self.buffer[meta["offset"] : meta["offset"] + size]
            bucket.append((name, data.view(meta["dtype"]).view(meta["shape"])))
        self._copies.at, before = "receiver", self._copies.at
        self._take(bucket)
        self._copies.at = before

    def recv(self):
        return b""

    def close(self):
        pass


class Sender(BoundedSender):
    """The sender, with its buckets in this process."""

    loopback: Loopback

    def _init_socket(self):
        self.socket = self.loopback

    def _init_buffer(self):
        self.buffer = self.loopback.buffer = torch.empty(self.bucket_size, dtype=torch.uint8)


def network():
    """Large and small tensors; the small ones are 1 % of the bytes."""
    sizes = [LARGE] * 2 + [LARGE // 100] * 2
    return nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in sizes])


def send(*, is_live):
    """One update of a replica on the sender's device -> bytes copied by each part, in units of the update's size."""
    receiver = WeightReceiver(network(), None)
    weights = {name: torch.ones_like(tensor) for name, tensor in receiver.module.state_dict().items()}
    copies = Copies()
    wire = Wire("", use_shm=False, is_live=is_live, dtype=torch.bfloat16, max_bucket_mb=64, timeout_s=1.0)
    sender = Sender(wire, lambda: None)
    with torch.no_grad(), copies:
        sender.loopback = Loopback(copies, receiver.begin_live() if is_live else receiver.begin_staged(CPU))
        copies.at = "sender"
        asyncio.run(sender.async_send_weights(_on_the_wire(weights.items(), wire, Checksum())))
        receiver.seal(checksum(weights.values()))
        copies.at = "switch"
        receiver.switch()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in receiver.module.state_dict().items())
    size = sum(tensor.nbytes for tensor in weights.values())
    return {part: num_bytes / size for part, num_bytes in copies.num_bytes.items()}, sender.loopback.num_messages


def test_colocated_one_copy_on_the_device_and_none_through_the_host():
    copied, num_messages = send(is_live=True)
    assert copied.keys() == {"sender", "receiver"}
    assert copied["receiver"] == 1.0, "straight into the network"
    assert copied["sender"] == pytest.approx(0.01, rel=0.01), "small tensors share a bucket"
    assert num_messages == 2 + 1
    assert sum(copied.values()) * 41e9 < 1.02 * 41e9, "20 B parameters in bf16"


def test_staged_one_copy_into_a_bucket_one_to_the_host_and_one_back():
    copied, num_messages = send(is_live=False)
    assert copied == {"sender": 1.0, "receiver": 1.0, "switch": 1.0}
    assert num_messages == 1
