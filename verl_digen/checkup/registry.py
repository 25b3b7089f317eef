# SPDX-License-Identifier: Apache-2.0
"""The checks by name, in order, with deadline and remedy. Light: a check's module is imported where it runs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from verl_digen.checkup.setting import Setting


@dataclass(frozen=True)
class CheckSpec:
    """A check, and what is said of it."""

    title: str
    """Claim that it checks, for the help text."""
    function: str
    """"module:function" below `verl_digen.checkup`; takes a `Setting`, returns a figure."""
    deadline_s: float
    """Its process is killed after this time; far more than it takes."""
    remedy: str
    """Remedy if it fails, unless the failure brings one."""
    least_s: float = 15.0
    """Time that must be left of `--budget` for it to start."""
    is_full: bool = False
    """True if only `--full` runs it."""

    def __call__(self, setting: Setting) -> str:
        """Run it in this process -> figure."""
        module, _, function = self.function.partition(":")
        return getattr(importlib.import_module(f"verl_digen.checkup.{module}"), function)(setting)


_RUN_REMEDY = "repair what the log's last lines name; the checks before this one tell which part"

CHECKS: dict[str, CheckSpec] = {
    "rates": CheckSpec(
        "matrix products, memory and copies of the device in TFLOP/s and GB/s",
        "rates:check_rates",
        120.0,
        "see the log: nothing of this project is used here",
        is_full=True,
    ),
    "identity": CheckSpec(
        "a replica's server computes on the device of its worker",
        "identity:check_identity",
        240.0,
        "start Ray and the run without the visible-devices variable and without a device order of your own; "
        "`nvidia-smi -L` lists the devices",
    ),
    "numerics": CheckSpec(
        "the self-test of an architecture, in fp32 and bf16",
        "numerics:check_numerics",
        120.0,
        "compare with `digen doctor --selftest ARCHITECTURE`, which runs on the CPU: if it passes, the device's "
        "kernels are at fault (driver, PyTorch build), else the versions (`digen doctor`)",
    ),
    "attention": CheckSpec(
        "attention's gradient in bf16 against fp32",
        "attention:check_attention",
        120.0,
        "set digen.attention_backend=_native_efficient, or _native_flash where no mask is wrong, or install a newer "
        "nvidia-cudnn-cu13",
    ),
    "gradient": CheckSpec(
        "the engine's deferred gradient equals the immediate one, on two devices if there are",
        "gradient:check_gradient",
        180.0,
        "install the tested PyTorch (`digen doctor`); if a collective hangs or fails, NCCL_DEBUG=INFO says why, and "
        "NCCL_P2P_DISABLE=1 rules out the link between the devices",
    ),
    "update": CheckSpec(
        "a weight update between two processes on a device, with its speed",
        "update:check_update",
        180.0,
        "CUDA IPC needs both processes in one container, with --ipc=host and the same devices; shared memory needs "
        "room in /dev/shm (`df -h /dev/shm`, docker run --shm-size)",
    ),
    "sleep": CheckSpec(
        "sleep gives the device's memory back, and waking the numbers",
        "sleeping:check_sleeping",
        120.0,
        "unset PYTORCH_CUDA_ALLOC_CONF, and end other processes on the device (nvidia-smi)",
    ),
    "training": CheckSpec(
        "three steps of the quick start through verl's main",
        "training:check_training",
        600.0,
        _RUN_REMEDY,
        least_s=40.0,
    ),
    "quickstart": CheckSpec(
        "five steps of the quick start's checkpoint, as a user starts it",
        "training:check_quickstart",
        600.0,
        _RUN_REMEDY,
        least_s=100.0,
        is_full=True,
    ),
    "quickstart_fp32": CheckSpec(
        "three steps of it in fp32, with the rewards of a CPU",
        "training:check_quickstart_fp32",
        600.0,
        _RUN_REMEDY,
        least_s=90.0,
        is_full=True,
    ),
    "sd3": CheckSpec(
        "Stable Diffusion 3.5 medium of published size, LoRA, 512 px, 10 steps with guidance, 9 trained, KL",
        "training:check_true_size",
        1800.0,
        _RUN_REMEDY,
        least_s=180.0,
        is_full=True,
    ),
    "sd3_fast": CheckSpec(
        "the same without guidance, 3 steps trained",
        "training:check_true_size",
        1800.0,
        _RUN_REMEDY,
        least_s=130.0,
        is_full=True,
    ),
    "sd3_nft": CheckSpec(
        "the same with DiffusionNFT",
        "training:check_true_size",
        1800.0,
        _RUN_REMEDY,
        least_s=150.0,
        is_full=True,
    ),
    "qwen_image": CheckSpec(
        "Qwen-Image of published size (20 B), LoRA, 512 px; its text encoder has one layer",
        "training:check_true_size",
        3600.0,
        _RUN_REMEDY,
        least_s=240.0,
        is_full=True,
    ),
    "architectures": CheckSpec(
        "the self-test of every architecture, in fp32 and bf16",
        "numerics:check_architectures",
        1800.0,
        "compare with `digen doctor --selftest ARCHITECTURE`, which runs on the CPU",
        least_s=45.0,
        is_full=True,
    ),
}
"""Name -> check, from the simplest to the whole."""
