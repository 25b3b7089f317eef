# SPDX-License-Identifier: Apache-2.0
"""The CPU seen as verl sees `torch.cuda`: `torch.cpu`, and what it lacks.

Memory is that of this process and of the machine, in bytes; "peak" is since the process began.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

import torch

get_rng_state = torch.get_rng_state
set_rng_state = torch.set_rng_state
manual_seed = torch.manual_seed
manual_seed_all = torch.manual_seed


def max_memory_allocated(device: Any = None) -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def memory_allocated(device: Any = None) -> int:
    """Resident memory of this process; its peak where the system has no /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return max_memory_allocated()


max_memory_reserved = max_memory_allocated
memory_reserved = memory_allocated


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) memory of the machine."""
    import psutil  # comes with Ray; only profiling asks

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def get_device_name(device: Any = None) -> str:
    return "cpu"


def current_device() -> Any:
    return torch.device("cpu")


def reset_peak_memory_stats(device: Any = None) -> None:
    """The system cannot forget a process's peak."""


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """The CPU allocator has no limit."""


def empty_cache() -> None:
    """The CPU allocator keeps no cache."""


def ipc_collect() -> None:
    """Tensors are not shared by handle."""


def __getattr__(name: str) -> Any:
    return getattr(torch.cpu, name)
