# SPDX-License-Identifier: Apache-2.0
"""The CPU as a platform of vLLM-Omni: the methods that vLLM-Omni requires of a platform."""

from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """CPU platform. Memory figures are this process's and the machine's, in bytes."""

    _omni_enum = OmniPlatformEnum.OOT
    _enum = CpuPlatform._enum

    # -- the classes that run diffusion -------------------------------------------------------------------
    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        return "verl_digen.rollout.vllm_omni.cpu.worker.CpuSDPABackend"

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        return "verl_digen.rollout.vllm_omni.cpu.worker.CpuDiffusionWorker"

    @classmethod
    def get_diffusion_model_runner_cls(cls) -> str:
        return "verl_digen.rollout.vllm_omni.cpu.worker.CpuDiffusionModelRunner"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    # -- what the device can do ---------------------------------------------------------------------------
    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def synchronize(cls) -> None:
        """No-op: the CPU computes in the calling thread."""

    @classmethod
    def empty_cache(cls) -> None:
        """No-op: the CPU has no cache of device memory."""

    # -- memory -------------------------------------------------------------------------------------------
    @classmethod
    def reset_peak_memory_stats(cls, device: Any = None) -> None:
        """No-op: the operating system cannot reset a process's peak."""

    @classmethod
    def max_memory_reserved(cls, device: Any = None) -> int:
        return psutil.Process().memory_info().rss

    max_memory_allocated = max_memory_reserved

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """(free, total) bytes."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return cls.get_device_memory(device)[0]

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return cls.get_device_memory()[1]
