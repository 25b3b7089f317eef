# SPDX-License-Identifier: Apache-2.0
"""Weights between processes, and between device and host.

An update goes from one process to another on the same device, as a trainer's rank sends it to its replica: live, into
the network, and staged, through host memory (`verl_digen.weights.receiver`).

A tiny network's memory does not show what the allocator keeps, so larger weights sleep beside a server. On a CPU the
resident memory of a process also changes by itself: there only the numbers of the larger weights are compared.
"""

import asyncio
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from verl.plugin.platform import get_platform

from verl_digen.config import DigenConfig
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models.tiny import build_tiny
from verl_digen.platforms.device_memory import allocated_bytes
from verl_digen.platforms.module_memory import DeviceMemory
from verl_digen.rollout.server import DiffusersServer
from verl_digen.tools.checkup.checks import CheckFailed, Setting
from verl_digen.weights.checksum import checksum
from verl_digen.weights.receiver import WeightReceiver
from verl_digen.weights.receiving import Receiving
from verl_digen.weights.sending import Wire, own_device, send_update

UPDATE_MB, ASLEEP_MB, CPU_UPDATE_MB, CPU_ASLEEP_MB = 4096, 4096, 128, 256
"""Sizes of the weight update and of the weights that sleep; on an accelerator large enough that its speed shows."""
LARGE_MB, SMALL_MB = 32, 1
"""Sizes of the update's tensors: half of the update is of the first, which travels by itself, half of the second."""
BUCKET_MB = 256
TIMEOUT_S = 60.0
"""Timeout for a part; the receiver's imports take a few seconds of the first one's."""


def check_update(setting: Setting) -> str:
    """Send an update each way to a process of its own. Raises CheckFailed: it did not arrive, or not as it was sent."""
    in_a_process = partial(ProcessPoolExecutor, 1, mp_context=multiprocessing.get_context("spawn"))
    return round_trips(CPU_UPDATE_MB if setting.is_cpu else UPDATE_MB, in_a_process)


def round_trips(size_mb: int, receiver: Callable[[], Executor]) -> str:
    """Send an update each way -> figure. `receiver`: makes what runs the receiver, at the same time as the sender."""
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
    device = own_device()
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
        ready_s, done_s, loaded = receiving.result(TIMEOUT_S)
    if loaded != sent.value:
        raise RuntimeError(f"weights with checksum {sent.value:x} were sent, the network holds {loaded:x}")
    return done_s - max(began_s, ready_s)


def receive(wire: Wire, size_mb: int) -> tuple[float, float, int]:
    """Receive one update into a network of zeros, as a replica's server does -> (time at which it began to receive,
    time at which the network computed with the update, checksum of its tensors); times by the machine's clock."""
    device = own_device()
    network = WeightReceiver(_network(size_mb, device, is_filled=False), None)
    take = network.begin_live() if wire.is_live else network.begin_staged(device)
    ready_s = time.monotonic()
    receiving = Receiving(wire.handle, device, take, use_shm=wire.use_shm, timeout_s=wire.timeout_s)
    network.seal(receiving.arrived().value)
    network.switch()
    get_platform().synchronize()
    done_s = time.monotonic()
    return ready_s, done_s, checksum(network.module.state_dict().values())


def _network(size_mb: int, device: torch.device, *, is_filled: bool) -> nn.Module:
    """bf16 tensors of `size_mb` MiB in all, with random numbers or zeros."""
    large = size_mb // (2 * LARGE_MB)
    sizes = [LARGE_MB] * large + [SMALL_MB] * (size_mb - large * LARGE_MB)
    make = torch.randn if is_filled else torch.zeros
    return _frozen(make((mb << 20) // torch.bfloat16.itemsize, dtype=torch.bfloat16, device=device) for mb in sizes)


def _frozen(tensors: Iterable[Tensor]) -> nn.Module:
    return nn.ParameterList([nn.Parameter(tensor, requires_grad=False) for tensor in tensors])


TOLERANCE = 0.02
"""Share of the memory that may stay, or come back more or less."""
TENSOR_MB = 64
"""Size of one of the larger weights."""


def check_sleeping(setting: Setting) -> str:
    """Let a server and larger weights sleep and wake. CheckFailed if memory stayed or is lost, or numbers changed."""
    device = own_device()
    figure = sleep_and_wake(CPU_ASLEEP_MB if setting.is_cpu else ASLEEP_MB, device)
    if device.type != "cpu":
        asyncio.run(_server_sleeps(setting))
    return figure


def sleep_and_wake(size_mb: int, device: torch.device) -> str:
    """Free and restore weights of `size_mb` MiB, half of which an update replaces -> figure."""
    _warm_up(device)
    platform, start = get_platform(), _held_bytes()
    kept, replaced = (_weights(size_mb // 2, device) for _ in range(2))
    before, own = checksum(kept.parameters()), _held_bytes() - start
    is_counted = device.type != "cpu"
    memory = DeviceMemory([kept, replaced], device, f"checkup-{os.getpid()}" if is_counted else None)

    began_s = time.perf_counter()
    memory.release(replaced=replaced.parameters)
    platform.synchronize()
    slept_s = time.perf_counter()
    if is_counted:
        _compare("asleep", _held_bytes() - start, 0, own)

    woke_s = time.perf_counter()
    memory.restore()
    platform.synchronize()
    ended_s = time.perf_counter()
    figure = f"{size_mb} MiB asleep in {slept_s - began_s:.2f} s and back in {ended_s - woke_s:.2f} s"
    if is_counted:
        back = _held_bytes() - start
        _compare("awake again", back, own, own)
        figure += f", {abs(back / own - 1):.1%} off"
    if checksum(kept.parameters()) != before:
        raise CheckFailed("weights that no update replaces have other numbers after sleep and wake")
    return figure


def _warm_up(device: torch.device) -> None:
    """Release and restore one tensor: what the first use of each operation loads is no memory of the weights."""
    weights = _weights(TENSOR_MB, device)
    checksum(weights.parameters())
    memory = DeviceMemory([weights], device, None)
    memory.release(replaced=tuple)
    memory.restore()
    del weights, memory
    get_platform().empty_cache()


async def _server_sleeps(setting: Setting) -> None:
    """Let a replica's server sleep and wake: transformer, text encoders and VAE."""
    gc.collect()  # of what slept before, which is not to be freed in between
    start = allocated_bytes()
    path = build_tiny(setting.architecture, setting.folder / "checkpoint")
    model = DiffusionModelConfig(path=str(path), digen=DigenConfig())
    server = DiffusersServer(SimpleNamespace(dtype="bfloat16"), model, num_threads=0)
    own = allocated_bytes() - start
    await server.sleep()
    _compare("of a sleeping server", allocated_bytes() - start, 0, own)
    await server.wake_up()
    _compare("of a server that woke", allocated_bytes() - start, own, own)


def _compare(when: str, found: int, expected: int, own: int) -> None:
    if abs(found - expected) > TOLERANCE * own:
        raise CheckFailed(
            f"device memory {when}: {found / 1e6:.1f} MB where {expected / 1e6:.1f} MB were due; {TOLERANCE:.0%} of "
            f"{own / 1e6:.1f} MB are tolerated"
        )


def _held_bytes() -> int:
    """Device memory that this process keeps from others, without what its allocator could give back."""
    platform = get_platform()
    platform.synchronize()
    platform.empty_cache()
    return platform.device_module.memory_reserved()


def _weights(size_mb: int, device: torch.device) -> nn.Module:
    count, numel = max(1, size_mb // TENSOR_MB), (TENSOR_MB << 20) // torch.float32.itemsize
    return _frozen(torch.full((numel,), float(number), device=device) for number in range(count))
