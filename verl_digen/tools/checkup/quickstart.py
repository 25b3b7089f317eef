# SPDX-License-Identifier: Apache-2.0
"""Devices of `make quickstart` on this machine: `python -m verl_digen.tools.checkup.quickstart` prints it."""

from __future__ import annotations

import os

QUICKSTART_PROMPTS = 8
"""Prompts of a step of recipe=digen_quickstart (`data.train_batch_size`)."""
MAX_CPU_RANKS = 2
"""Trainer ranks, and replicas, of the quick start on a CPU. Two of one thread train its rows faster than one of two
threads (docs/quickstart.md); each rank and each replica takes 1 GB."""


def quickstart_devices(found: int) -> int:
    """Devices that the quick start uses, all for both training and generation.

    The most that divide its prompts: ranks share the rows of a step evenly.

    Args:
        found: accelerators of this machine; 0 counts as one device.

    Example:
        [quickstart_devices(found) for found in (0, 1, 2, 3, 6, 8, 16)]  # [1, 1, 2, 2, 4, 8, 8]
    """
    fitting = [count for count in range(1, QUICKSTART_PROMPTS + 1) if QUICKSTART_PROMPTS % count == 0]
    return max(count for count in fitting if count <= max(found, 1))


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
