# SPDX-License-Identifier: Apache-2.0
"""Name of the process's device, for metrics that need its peak FLOP/s."""

from __future__ import annotations

from verl.plugin.platform import get_platform


def accelerator_name() -> str | None:
    """The platform's name of this process's first device, e.g. "NVIDIA H100 80GB HBM3"; None on a CPU."""
    platform = get_platform()
    return None if platform.device_name == "cpu" else platform.device_module.get_device_name(0)
