# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni on a machine without an accelerator: entry points of `vllm.platform_plugins` and of
`vllm_omni.platform_plugins`.

Active under the same condition as verl's platform `cpu`: with a CPU build of PyTorch, or with VERL_PLATFORM=cpu. Every
process that imports vLLM calls these functions, so they import nothing heavy.
"""

import os

from verl_digen.hardware.torch_support import accelerator_support


def _is_active() -> bool:
    asked = os.environ.get("VERL_PLATFORM")
    return asked == "cpu" if asked else not accelerator_support()


def vllm_platform() -> str | None:
    """vLLM's own CPU platform; without this, its wheel for CUDA finds none."""
    return "vllm.platforms.cpu.CpuPlatform" if _is_active() else None


def omni_platform() -> str | None:
    """This project's CPU platform; vLLM-Omni has none."""
    return "verl_digen.rollout.vllm_omni.cpu.platform.CpuOmniPlatform" if _is_active() else None
