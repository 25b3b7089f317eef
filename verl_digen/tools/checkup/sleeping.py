# SPDX-License-Identifier: Apache-2.0
"""Sleep gives the device's memory back, and waking brings back the memory and every number that no update replaces.

A server of the architecture's tiny checkpoint sleeps and wakes as in a run. A tiny network's memory does not show what
the allocator keeps, so larger weights do the same. On a CPU a server keeps its memory, and the resident memory of a
process also changes by itself: there the larger weights do it alone, and only their numbers are compared.
"""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace

import torch
from torch import nn
from verl.plugin.platform import get_platform

from verl_digen.config import DigenConfig
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models.tiny import build_tiny
from verl_digen.platforms.module_memory import DeviceMemory
from verl_digen.rollout.server import DiffusersServer
from verl_digen.tools.checkup.checks import CheckFailed, Setting
from verl_digen.weights.checksum import checksum
from verl_digen.weights.sending import own_device

TOLERANCE = 0.02
"""Share of the memory that may stay, or come back more or less."""
TENSOR_MB = 64
"""Size of one of the larger weights."""


def check_sleeping(setting: Setting) -> str:
    """Let a server and larger weights sleep and wake.

    Raises:
        CheckFailed: memory stayed or did not come back, or numbers changed.
    """
    device = own_device(get_platform().device_name)
    figure = sleep_and_wake(setting.asleep_mb, device)
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
    start = _allocated_bytes()
    path = build_tiny(setting.architecture, setting.folder / "checkpoint")
    model = DiffusionModelConfig(path=str(path), digen=DigenConfig())
    server = DiffusersServer(SimpleNamespace(dtype="bfloat16"), model, num_threads=0)
    own = _allocated_bytes() - start
    await server.sleep()
    _compare("of a sleeping server", _allocated_bytes() - start, 0, own)
    await server.wake_up()
    _compare("of a server that woke", _allocated_bytes() - start, own, own)


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


def _allocated_bytes() -> int:
    return get_platform().device_module.memory_allocated()


def _weights(size_mb: int, device: torch.device) -> nn.Module:
    count, numel = max(1, size_mb // TENSOR_MB), (TENSOR_MB << 20) // torch.float32.itemsize
    tensors = [torch.full((numel,), float(number), device=device) for number in range(count)]
    return nn.ParameterList([nn.Parameter(tensor, requires_grad=False) for tensor in tensors])
