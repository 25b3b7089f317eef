# SPDX-License-Identifier: Apache-2.0
"""Choices made from free memory: rows per tile, and whether gradients may stay unreduced.

- Rows: the peak of one forward/backward grows linearly with its rows. So the peaks of 1 row and of 2 give the rows
  that fit, less a margin for what varies from call to call (longer prompts, fragmentation).
- Unreduced gradients take a full copy on each rank. That must be at most `UNREDUCED_SHARE` of the free memory.
- On a CPU memory does not limit a tile, and a process's peak memory cannot be reset: tiles have a fixed number of
  rows, enough to keep caches and cores busy.

Invariants (tests/engine/test_memory.py): the rows chosen fit by the measurements, one more would not; at least 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_id, get_device_name

MARGIN = 0.1
"""Share of the device's memory that a tile leaves free."""
CPU_ROWS = 8
"""Rows of an automatic tile on a CPU."""
UNREDUCED_SHARE = 0.4
"""Share of free memory that unreduced gradients may take; the rest is for activations and the reduction itself."""


def rows_that_fit(peak_bytes: Callable[[int], int], limit_bytes: int) -> int:
    """Number of rows that fit into a tile, at least 1.

    Args:
        peak_bytes: rows -> the peak of their forward/backward; called with 1 twice, the first time to allocate what
            stays (gradients, workspaces), and with 2.
        limit_bytes: memory this process can use in all.

    Example: a base of 10 GB, 2 GB per row, 80 GB
        rows_that_fit(lambda rows: (10 + 2 * rows) * GB, 80 * GB)  # 31 = (80 * 0.9 - 10) / 2
    """
    peak_bytes(1)
    one, two = peak_bytes(1), peak_bytes(2)
    room = int(limit_bytes * (1 - MARGIN)) - one
    return 1 + max(0, room // max(two - one, 1))


def gradients_may_wait(unreduced_bytes: int, free_bytes: int) -> bool:
    """True if gradients of this size may stay unreduced until the batch is complete."""
    return unreduced_bytes <= UNREDUCED_SHARE * free_bytes


def free_bytes(num_ranks: int) -> int:
    """Memory this process can still allocate: on its device, or its share of the host's on a CPU.

    Args:
        num_ranks: ranks that may share the host; read on a CPU only.
    """
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


def limit_bytes() -> int:
    """Device memory this process can use in all, in bytes."""
    device = get_platform().device_module
    return free_bytes(1) + device.memory_allocated()


def agreed_least(value: int, group: torch.distributed.ProcessGroup | None) -> int:
    """Minimum of all ranks' values. Collective."""
    least = torch.tensor(value, device=get_device_id())
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    return int(least)
