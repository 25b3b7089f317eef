# SPDX-License-Identifier: Apache-2.0
"""Override of `make quickstart` for this machine: `python -m verl_digen.checkup.quickstart` prints it."""

from __future__ import annotations

from verl_digen.checkup.setting import quickstart_devices


def override(found: int) -> str:
    """Override of recipe=digen_quickstart on a machine with `found` accelerators; "" where it trains on one device.

    Example:
        override(8)  # "trainer.n_gpus_per_node=8"
    """
    devices = quickstart_devices(found)
    return f"trainer.n_gpus_per_node={devices}" if devices > 1 else ""


def main() -> None:
    from verl.plugin.platform import get_platform  # takes seconds

    platform = get_platform()
    found = 0 if platform.device_name == "cpu" or not platform.is_available() else platform.device_count()
    print(override(found))


if __name__ == "__main__":
    main()
