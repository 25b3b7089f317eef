# SPDX-License-Identifier: Apache-2.0
"""CPU counterpart of `torch.cuda` for verl: `torch.cpu` plus the functions that it lacks.

Memory figures are this process's and the machine's, in bytes; "peak" is since the process started.
"""

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
    """Resident memory of this process; its peak if the system has no /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return max_memory_allocated()


max_memory_reserved = max_memory_allocated
memory_reserved = memory_allocated


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) memory of the machine."""
    import psutil  # installed with Ray; only profiling needs it

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def get_device_name(device: Any = None) -> str:
    return "cpu"


def current_device() -> Any:
    return torch.device("cpu")


def reset_peak_memory_stats(device: Any = None) -> None:
    """No-op: the system cannot reset a process's peak."""


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """No-op: the CPU allocator has no limit."""


def empty_cache() -> None:
    """No-op: the CPU allocator keeps no cache."""


def ipc_collect() -> None:
    """No-op: tensors are not shared by handle."""


def __getattr__(name: str) -> Any:
    return getattr(torch.cpu, name)
