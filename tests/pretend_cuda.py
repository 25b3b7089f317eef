# SPDX-License-Identifier: Apache-2.0
"""An accelerator's memory of 100 bytes, as `device_memory` reads it; tests add what allocates there."""

from types import SimpleNamespace

import pytest

from verl_digen.platforms import device_memory

CAPACITY = 100


class FakeCuda:
    """Stands in for torch.cuda."""

    network = 40
    """Bytes that stay allocated."""
    peak = 0

    def memory_allocated(self) -> int:
        return self.network

    memory_reserved = memory_allocated

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.network

    def mem_get_info(self) -> tuple[int, int]:
        return CAPACITY - self.network, CAPACITY

    def empty_cache(self) -> None:
        pass

    def put_in(self, patch: pytest.MonkeyPatch) -> None:
        """Make it the device that is asked."""
        platform = SimpleNamespace(device_module=self, synchronize=lambda: None)
        patch.setattr(device_memory, "get_platform", lambda: platform)
        patch.setattr(device_memory, "get_device_name", lambda: "pretend")
