# SPDX-License-Identifier: Apache-2.0
"""verl's platform `cpu`: training and generation without any accelerator.

- Auto-detected only if the PyTorch build supports no accelerator. A head node without a GPU has a PyTorch build that
  does, so a cluster is never mistaken for a CPU machine because of the driver's node.
- `VERL_PLATFORM=cpu` in the environment selects it anywhere.
- Ray sees it as logical GPUs (`ray_kwargs.ray_init.num_gpus`), because verl's placement counts only GPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_digen.hardware.torch_support import accelerator_support
from verl_digen.platforms import cpu_device


class CpuPlatform(PlatformBase):
    """The CPU as a verl device."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return cpu_device

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """True if verl should auto-detect this platform. verl asks platforms in order of registration and takes the
        first that returns True, so this one also asks the platforms of plugins that were loaded after it."""
        if accelerator_support():
            return False
        names = PlatformRegistry.registered_names()
        later = names[names.index("cpu") + 1 :] if "cpu" in names else ()
        platforms = [PlatformRegistry.get(name) for name in later]
        return not any(platform and platform().is_platform_available(use_smi_check) for platform in platforms)

    def current_device(self) -> Any:
        """The device, not an index as on other platforms: a CPU build of PyTorch refuses `tensor.to(0)`."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None:
        """No-op: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """No-op: CPU operations are done when they return."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """No-op: the CPU allocator has no settings."""

    def empty_cache(self) -> None:
        """No-op: the CPU allocator keeps no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # Ray's name for the logical GPUs of a worker

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """No-op: there is no device profiler."""

    def profiler_stop(self) -> None:
        """No-op: there is no device profiler."""

    def cudart(self) -> None:
        return None
