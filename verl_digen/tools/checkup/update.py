# SPDX-License-Identifier: Apache-2.0
"""A weight update from one process to another on the same device, as a trainer's rank sends it to its replica.

Both ways of `verl_digen.weights.receiver`: live, into the network, and staged, through host memory. By CUDA IPC on a
platform that has it, else through shared memory.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from verl.plugin.platform import get_platform

from verl_digen.tools.checkup.checks import CheckFailed, Setting
from verl_digen.weights.checksum import checksum
from verl_digen.weights.receiver import WeightReceiver
from verl_digen.weights.receiving import Receiving
from verl_digen.weights.sending import Wire, own_device, send_update

LARGE_MB, SMALL_MB = 32, 1
"""Sizes of the tensors: half of the update is of the first, which travels by itself, half of the second."""
BUCKET_MB = 256
TIMEOUT_S = 60.0
"""Timeout for a part; the receiver's imports take a few seconds of the first one's."""


@dataclass(frozen=True)
class Received:
    """The receiver's report."""

    ready_s: float
    """Monotonic time at which it began to receive; the clock is the machine's."""
    done_s: float
    """Monotonic time at which the network computed with the update."""
    loaded: int
    """Checksum of the network's tensors."""


def check_update(setting: Setting) -> str:
    """Send an update each way to a process of its own.

    Raises:
        CheckFailed: it did not arrive, or not as it was sent.
    """
    context = multiprocessing.get_context("spawn")

    def in_a_process() -> Executor:
        return ProcessPoolExecutor(1, mp_context=context)

    return round_trips(setting.update_mb, in_a_process)


def round_trips(size_mb: int, receiver: Callable[[], Executor]) -> str:
    """Send an update each way -> figure.

    Args:
        receiver: makes what runs the receiver, at the same time as the sender.
    """
    speeds = {}
    for is_live in (True, False):
        name = "live" if is_live else "staged"
        try:
            seconds = _round_trip(size_mb, receiver, is_live=is_live)
        except Exception as error:
            raise CheckFailed(f"a {name} update of {size_mb} MiB: {error}") from error
        speeds[name] = (size_mb << 20) / seconds / 1e9
    way = "CUDA IPC" if get_platform().is_ipc_supported() else "shared memory"
    return f"{size_mb} MiB by {way}: " + ", ".join(f"{name} {speed:.2f} GB/s" for name, speed in speeds.items())


def _round_trip(size_mb: int, receiver: Callable[[], Executor], *, is_live: bool) -> float:
    """Seconds from the first byte to the loaded network."""
    device = own_device(get_platform().device_name)
    with tempfile.TemporaryDirectory(prefix="digen-weights-") as folder, receiver() as pool:
        wire = Wire(
            handle=f"ipc://{folder}/update.sock",
            use_shm=not get_platform().is_ipc_supported(),
            is_live=is_live,
            dtype=torch.bfloat16,
            max_bucket_mb=BUCKET_MB,
            timeout_s=TIMEOUT_S,
        )
        weights = _network(size_mb, device, is_filled=True).state_dict()
        receiving = pool.submit(receive, wire, size_mb)
        began_s = time.monotonic()
        try:
            sent = asyncio.run(send_update(weights.items(), wire, receiver="the receiver", has_died=receiving.done))
        except RuntimeError:
            if receiving.done():
                receiving.result()  # says why
            raise
        received = receiving.result(TIMEOUT_S)
    if received.loaded != sent.value:
        raise RuntimeError(f"weights with checksum {sent.value:x} were sent, the network holds {received.loaded:x}")
    return received.done_s - max(began_s, received.ready_s)


def receive(wire: Wire, size_mb: int) -> Received:
    """Receive one update into a network of zeros, as a replica's server does."""
    device = own_device(get_platform().device_name)
    network = WeightReceiver(_network(size_mb, device, is_filled=False), None)
    take = network.begin_live() if wire.is_live else network.begin_staged(device)
    ready_s = time.monotonic()
    receiving = Receiving(wire.handle, device, take, use_shm=wire.use_shm, timeout_s=wire.timeout_s)
    network.seal(receiving.result().checksum)
    network.switch()
    get_platform().synchronize()
    done_s = time.monotonic()
    return Received(ready_s, done_s, checksum(network.module.state_dict().values()))


@torch.no_grad()
def _network(size_mb: int, device: torch.device, *, is_filled: bool) -> nn.Module:
    """bf16 tensors of `size_mb` MiB in all, with random numbers or zeros."""
    large = size_mb // (2 * LARGE_MB)
    sizes = [LARGE_MB] * large + [SMALL_MB] * (size_mb - large * LARGE_MB)

    def tensor(mb: int) -> Tensor:
        make = torch.randn if is_filled else torch.zeros
        return make((mb << 20) // torch.bfloat16.itemsize, dtype=torch.bfloat16, device=device)

    return nn.ParameterList([nn.Parameter(tensor(mb), requires_grad=False) for mb in sizes])
