# SPDX-License-Identifier: Apache-2.0
"""The pretend device as a verl platform, for `get_platform()` and `get_device_name()`."""

from __future__ import annotations

from typing import Any

import torch
from verl.plugin.platform import PlatformRegistry, set_platform

from tests.pretend.tensor import NAME
from verl_digen.platforms.cpu import CpuPlatform


class PretendPlatform(CpuPlatform):
    """Like the CPU's, except for the device."""

    @property
    def device_name(self) -> str:
        return NAME

    @property
    def vendor_name(self) -> str:
        return NAME

    @property
    def device_module(self) -> Any:
        return torch.get_device_module(NAME)

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # chosen by name alone

    def current_device(self) -> int:
        return 0

    def synchronize(self, device_index: int | None = None) -> None:
        self.device_module.synchronize()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return 9, 0

    def communication_backend_name(self) -> str:
        return f"cpu:gloo,{NAME}:gloo"


def use_platform() -> None:
    """Make it this process's platform; VERL_PLATFORM=pretend names it too."""
    PlatformRegistry.register(platform=NAME)(PretendPlatform)
    set_platform(PretendPlatform())
