# SPDX-License-Identifier: Apache-2.0
"""Override of `make quickstart` for this machine: `python -m verl_digen.checkup.quickstart` prints it."""

from __future__ import annotations

import os

from verl_digen.checkup.setting import quickstart_devices

MAX_CPU_RANKS = 2
"""Trainer ranks, and replicas, of the quick start on a CPU. Two of one thread train its rows faster than one of two
threads (docs/quickstart.md); each rank and each replica takes 1 GB."""


def override(found: int, num_cores: int) -> str:
    """Override of recipe=digen_quickstart on this machine; "" where it trains on one device.

    Args:
        found: accelerators of this machine.
        num_cores: CPU cores of this process.

    Example:
        override(8, 64)  # "trainer.n_gpus_per_node=8"
        override(0, 2)  # "trainer.n_gpus_per_node=2": two ranks of one thread
    """
    devices = quickstart_devices(found) if found else min(num_cores, MAX_CPU_RANKS)
    return f"trainer.n_gpus_per_node={devices}" if devices > 1 else ""


def main() -> None:
    from verl.plugin.platform import get_platform  # takes seconds

    platform = get_platform()
    found = 0 if platform.device_name == "cpu" or not platform.is_available() else platform.device_count()
    print(override(found, len(os.sched_getaffinity(0))))


if __name__ == "__main__":
    main()
