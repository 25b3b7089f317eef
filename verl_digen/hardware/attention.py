# SPDX-License-Identifier: Apache-2.0
"""Attention kernels by diffusers' names (`AttentionBackendName` of diffusers 0.40 to 0.42), and what each can do.

- Facts come from `diffusers.models.attention_dispatch`; nothing of it is imported, so that a config can be checked
  on any machine. `tests/contracts/test_attention.py` compares.
- A kernel without masks needs texts of one length in each forward; see `DiffusionModel.keeps_lengths_apart`. The
  `*varlen` kernels of a local package count as such: diffusers gives them a row's first keys, which are others than
  the unmasked ones where padding is not last (Qwen-Image).
- `trains` is false where diffusers calls a kernel without a backward.
- Where devices share a row's tokens (`verl_digen.models.sequence`), diffusers runs the kernels that have a `split`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from verl_digen.require import require, require_one_of

NATIVE = "native"
"""PyTorch's own choice among its kernels."""


@dataclass(frozen=True)
class Package:
    """A Python package that brings kernels."""

    module: str
    """Import name."""
    distribution: str
    """Name for the installer."""
    least: tuple[int, ...] = ()
    """Minimum version; () for any."""


@dataclass(frozen=True)
class Split:
    """Abilities of a kernel where devices share a row's tokens."""

    takes_masks: bool = False
    """False for cuDNN's: diffusers hands it a mask of booleans as numbers to add."""


@dataclass(frozen=True)
class AttentionBackend:
    """Abilities of a kernel."""

    devices: tuple[str, ...] = ("cuda",)
    """Device types that it runs on; () for any."""
    package: Package | None = None
    """None: part of PyTorch."""
    takes_masks: bool = False
    takes_fp32: bool = False
    """False: bfloat16 or float16 only, on an accelerator."""
    trains: bool = True
    split: Split | None = None
    """None: diffusers refuses it, or its backward, where devices share a row's tokens."""


_FLASH = Package("flash_attn", "flash-attn", (2, 6, 3))
_FLASH_3 = Package("flash_attn_3", "flash-attn-3")
_HUB = Package("kernels", "kernels", (0, 12))

ATTENTION_BACKENDS: Mapping[str, AttentionBackend] = {
    NATIVE: AttentionBackend((), takes_masks=True, takes_fp32=True, split=Split(takes_masks=True)),
    "flash": AttentionBackend(package=_FLASH, split=Split()),
    "flash_hub": AttentionBackend(package=_HUB, split=Split()),
    "flash_varlen": AttentionBackend(package=_FLASH),
    "flash_varlen_hub": AttentionBackend(package=_HUB, takes_masks=True, split=Split(takes_masks=True)),
    "flash_4_hub": AttentionBackend(package=Package("kernels", "kernels", (0, 12, 3))),
    "_flash_3": AttentionBackend(package=_FLASH_3, trains=False),
    "_flash_varlen_3": AttentionBackend(package=_FLASH_3),
    "_flash_3_hub": AttentionBackend(package=_HUB, split=Split()),
    "_flash_3_varlen_hub": AttentionBackend(package=_HUB, takes_masks=True, split=Split(takes_masks=True)),
    "aiter_fa2_hub": AttentionBackend(package=_HUB),
    "_native_cudnn": AttentionBackend(takes_masks=True, split=Split()),
    "_native_efficient": AttentionBackend(takes_masks=True, takes_fp32=True),
    "_native_flash": AttentionBackend(("cuda", "cpu"), split=Split()),
    "_native_math": AttentionBackend((), takes_masks=True, takes_fp32=True),
    "_native_npu": AttentionBackend(("npu",), Package("torch_npu", "torch-npu"), takes_masks=True),
}
"""Name -> kernel. diffusers' others are not here: SageAttention quantizes queries and keys, so log-probs would be those
of another policy, and has no backward; the rest has not been asked for."""


def check_name(key: str, name: str) -> None:
    """Raise ValueError unless a run may use the kernel `name`; says which one was probably meant."""
    require_one_of(key, name, sorted(ATTENTION_BACKENDS))


def check_use(key: str, name: str, *, trains: bool, dtype: str, device: str) -> None:
    """Raise ValueError if the kernel cannot do what this side of the run asks of it.

    Args:
        trains: True for the trainer. dtype: e.g. "bfloat16" or "fp32". device: type, e.g. "cuda".
    """
    backend = ATTENTION_BACKENDS[name]
    require(
        backend.trains or not trains,
        f"{key} must be a kernel with a backward for the trainer: diffusers calls this one without",
        name,
        "set digen.attention_backend=_flash_varlen_3 or _flash_3_hub, and the same for the replicas",
    )
    require(
        backend.takes_fp32 or "32" not in dtype or device == "cpu",
        f"{key} must be a kernel for {dtype}, in which this side computes",
        name,
        "set it to native, or compute in bfloat16",
    )


def check_split(key: str, name: str, size_key: str, *, needs_masks: bool) -> None:
    """Raise ValueError if the kernel cannot train where devices share a row's tokens.

    Args:
        size_key: key of the number of these devices. needs_masks: prompts are padded.
    """
    split = ATTENTION_BACKENDS[name].split
    able = [
        each
        for each, backend in ATTENTION_BACKENDS.items()
        if backend.split is not None and (backend.split.takes_masks or not needs_masks)
    ]
    asked = [
        "diffusers can run on a row's tokens split over devices",
        "with its backward",
        *(["under the mask of prompts that are padded for it"] if needs_masks else []),
    ]
    require(
        name in able and split is not None,
        f"{key} must be a kernel that {', '.join(asked)}",
        name,
        f"choose one of {', '.join(able)}, or set {size_key} to 1",
    )


def check_machine(key: str, name: str, device: str) -> None:
    """Raise ValueError unless the kernel runs on this type of device, and its package is installed."""
    backend = ATTENTION_BACKENDS[name]
    require(
        not backend.devices or device in backend.devices,
        f"{key} must be a kernel for {device}, the device of this run",
        name,
        f"it runs on {' or '.join(backend.devices)}; native runs everywhere",
    )
    package = backend.package
    if package is None:
        return
    found = _version(package)
    wanted = package.distribution + (f">={'.'.join(map(str, package.least))}" if package.least else "")
    require(
        found is not None and found >= package.least,
        f"{key} must be a kernel that is installed, and this one needs {wanted}",
        name,
        f"install {wanted} in the environment of the run, or set it to native",
    )


def _version(package: Package) -> tuple[int, ...] | None:
    """The installed version's numbers; None where it is not installed."""
    if find_spec(package.module) is None:
        return None
    try:
        numbers = version(package.distribution).split("+")[0].split(".")
    except PackageNotFoundError:  # a build from source may have another distribution's name
        return (10**6,)
    return tuple(int(number) for number in numbers if number.isdigit())
