# SPDX-License-Identifier: Apache-2.0
"""The checks of `digen doctor --gpu` by name, in order, with deadline and remedy, and what they are given.

A check returns a figure and raises `CheckFailed`, or whatever its parts raise.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path

from verl_digen.observe.run_files import append_line

FIGURES = "figures.jsonl"
"""File in a check's folder: its measurements, written as they come."""


class CheckFailed(Exception):
    """A fault of the machine that a check found."""


def cause_of(error: BaseException) -> str:
    """The error in words; of one that a check did not raise itself with its type."""
    return str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Setting:
    """Arguments of every check."""

    folder: Path
    """Empty folder for checkpoints, sockets and logs of one check."""
    num_devices: int
    """Devices of this machine; 1 on a CPU."""
    architecture: str
    """Key of `verl_digen.models.tiny.BUILDERS`."""
    is_cpu: bool = False
    """True where there is no accelerator: networks of a published size are replaced by tiny ones."""

    def note(self, what: str, **figures: float | str) -> None:
        """Keep measurements at once, so that a check that is killed leaves them."""
        append_line(self.folder / FIGURES, {"what": what, **figures})


@dataclass(frozen=True)
class CheckSpec:
    """A check, and what is said of it."""

    title: str
    """Claim that it checks, for the help text."""
    function: str
    """"module:function" below `verl_digen.tools.checkup`, imported where the check runs."""
    deadline_s: float
    """Its process is killed after this time; far more than it takes."""
    remedy: str
    least_s: float = 15.0
    """Time that must be left of `--budget` for it to start."""
    is_full: bool = False
    """True if only `--full` runs it."""

    def __call__(self, setting: Setting) -> str:
        """Run it in this process -> figure."""
        module, _, function = self.function.partition(":")
        return getattr(importlib.import_module(f"verl_digen.tools.checkup.{module}"), function)(setting)


def _run(title: str, deadline_s: float, least_s: float, *, is_full: bool = True) -> CheckSpec:
    """A check that trains."""
    remedy = "repair what the log's last lines name; the checks before this one tell which part"
    return CheckSpec(title, "training:check_run", deadline_s, remedy, least_s, is_full)


CHECKS: dict[str, CheckSpec] = {
    "rates": CheckSpec(
        *("matrix products, memory and copies of the device in TFLOP/s and GB/s", "device:check_rates", 120.0),
        "see the log: nothing of this project is used here",
        is_full=True,
    ),
    "numerics": CheckSpec(
        *("the self-test of an architecture, in fp32 and bf16", "selftest:check_numerics", 120.0),
        "compare with `digen doctor --selftest ARCHITECTURE`, which runs on the CPU: if it passes, the device's "
        "kernels are at fault (driver, PyTorch build), else the versions (`digen doctor`)",
    ),
    "attention": CheckSpec(
        *("attention's gradient in bf16 against fp32", "device:check_attention", 120.0),
        "set digen.attention_backend=_native_efficient, or _native_flash where no mask is wrong, or install a newer "
        "nvidia-cudnn-cu13",
    ),
    "gradient": CheckSpec(
        "the engine's deferred gradient equals the immediate one, on two devices if there are",
        *("gradient:check_gradient", 180.0),
        "install the tested PyTorch (`digen doctor`); if a collective hangs or fails, NCCL_DEBUG=INFO says why, and "
        "NCCL_P2P_DISABLE=1 rules out the link between the devices",
    ),
    "update": CheckSpec(
        *("a weight update between two processes on a device, with its speed", "weights:check_update", 180.0),
        "CUDA IPC needs both processes in one container, with --ipc=host and the same devices; shared memory needs "
        "room in /dev/shm (`df -h /dev/shm`, docker run --shm-size)",
    ),
    "sleep": CheckSpec(
        *("sleep gives the device's memory back, and waking the numbers", "weights:check_sleeping", 120.0),
        "unset PYTORCH_CUDA_ALLOC_CONF, and end other processes on the device (nvidia-smi)",
    ),
    "training": _run("three steps of the quick start through verl's main", 600.0, 40.0, is_full=False),
    "quickstart": _run("five steps of the quick start's checkpoint, as a user starts it", 600.0, 100.0),
    "quickstart_fp32": _run("three steps of it in fp32, with the rewards of a CPU", 600.0, 90.0),
    "sd3": _run(
        "Stable Diffusion 3.5 medium of published size, LoRA, 512 px, 10 steps with guidance, 9 trained, KL",
        *(1800.0, 180.0),
    ),
    "sd3_fast": _run("the same without guidance, 3 steps trained", 1800.0, 130.0),
    "sd3_nft": _run("the same with DiffusionNFT", 1800.0, 150.0),
    "qwen_image": _run(
        "Qwen-Image of published size (20 B), LoRA, 512 px; its text encoder has one layer", 3600.0, 240.0
    ),
    "flux": _run("FLUX.1-dev of published size (12 B), LoRA, 512 px, 3 steps trained", 3600.0, 200.0),
    "wan": _run("Wan2.1 1.3B of published size, LoRA, 33 frames of 240 x 416 px, guidance", 1800.0, 180.0),
    "architectures": CheckSpec(
        *("the self-test of every architecture, in fp32 and bf16", "selftest:check_architectures", 1800.0),
        "compare with `digen doctor --selftest ARCHITECTURE`, which runs on the CPU",
        least_s=45.0,
        is_full=True,
    ),
}
"""Name -> check, from the simplest to the whole."""
