# SPDX-License-Identifier: Apache-2.0
"""Measurement of this process's device memory: free, allocated, and the peak of a call."""

from collections.abc import Callable

from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name

MARGIN = 0.1
"""Share of the device's memory that is left free, for what varies from call to call."""


def free_bytes(num_ranks: int) -> int:
    """Memory this process can still allocate: on its device, or on a CPU its share of the host's, by `num_ranks`."""
    device = get_platform().device_module
    free, _ = device.mem_get_info()
    if get_device_name() == "cpu":
        return free // num_ranks
    return free + device.memory_reserved() - device.memory_allocated()


def peak_of(run: Callable[[], None]) -> int:
    """Peak device memory while `run` runs, in bytes."""
    device = get_platform().device_module
    device.empty_cache()
    device.reset_peak_memory_stats()
    run()
    get_platform().synchronize()
    return device.max_memory_allocated()


def release_cached() -> None:
    """Give memory back to the device that this process reserved and does not use."""
    get_platform().device_module.empty_cache()


def allocated_bytes() -> int:
    """Device memory that this process's tensors take now."""
    return get_platform().device_module.memory_allocated()


def limit_bytes() -> int:
    """Device memory this process can use in all, in bytes."""
    return free_bytes(1) + allocated_bytes()


def accelerator_name() -> str | None:
    """The platform's name of this process's first device, e.g. "NVIDIA H100 80GB HBM3"; None on a CPU."""
    platform = get_platform()
    return None if platform.device_name == "cpu" else platform.device_module.get_device_name(0)
