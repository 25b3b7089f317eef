# SPDX-License-Identifier: Apache-2.0
"""What memory decides: how many rows a tile holds, and whether gradients may wait unreduced.

- Rows: the peak of one forward/backward grows in proportion to its rows. So the peaks of 1 row and of 2 give the rows
  that fit, less a margin for what varies from call to call (longer prompts, fragmentation).
- Unreduced gradients take a full copy on each rank. They wait where that is at most a stated share of what is free.
- On a CPU memory is not what limits a tile, and what a process has had at most cannot be reset: a fixed number of
  rows, by which its caches and cores are busy.

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
    """How many rows fit into a tile, at least 1.

    Args:
        peak_bytes: rows -> the peak of their forward/backward; called with 1 twice, the first time to allocate what
            stays (gradients, workspaces), and with 2.
        limit_bytes: what this process can have.

    Example: a base of 10 GB, 2 GB a row, 80 GB
        rows_that_fit(lambda rows: (10 + 2 * rows) * GB, 80 * GB)  # 31 = (80 * 0.9 - 10) / 2
    """
    peak_bytes(1)
    one, two = peak_bytes(1), peak_bytes(2)
    room = int(limit_bytes * (1 - MARGIN)) - one
    return 1 + max(0, room // max(two - one, 1))


def gradients_may_wait(unreduced_bytes: int, free_bytes: int) -> bool:
    """Whether gradients of this size may stay unreduced until the batch is complete."""
    return unreduced_bytes <= UNREDUCED_SHARE * free_bytes


def free_bytes(num_ranks: int) -> int:
    """Memory this process can still have: of its device, or its part of a machine without one.

    Args:
        num_ranks: ranks that may share the machine, where memory is the machine's.
    """
    device = get_platform().device_module
    free, _ = device.mem_get_info()
    if get_device_name() == "cpu":
        return free // num_ranks
    return free + device.memory_reserved() - device.memory_allocated()


def peak_of(run: Callable[[], None]) -> int:
    """The most bytes of the device that were in use while `run` ran."""
    device = get_platform().device_module
    device.empty_cache()
    device.reset_peak_memory_stats()
    run()
    get_platform().synchronize()
    return device.max_memory_allocated()


def limit_bytes() -> int:
    """What this process can have of its device in all."""
    device = get_platform().device_module
    return free_bytes(1) + device.memory_allocated()


def agreed_least(value: int, group: torch.distributed.ProcessGroup | None) -> int:
    """The least of all ranks' values; collective."""
    least = torch.tensor(value, device=get_device_id())
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    return int(least)
