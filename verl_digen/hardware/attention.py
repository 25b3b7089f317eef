# SPDX-License-Identifier: Apache-2.0
"""Attention kernels by diffusers' names (`AttentionBackendName` of diffusers 0.40 to 0.42), and what each can do.

- Facts come from `diffusers.models.attention_dispatch`; nothing of it is imported, so that a config can be checked on
  any machine. `tests/contracts/test_attention.py` compares.
- A kernel without masks needs texts of one length in each forward; see `DiffusionModel.keeps_lengths_apart`. The
  `*varlen` kernels of a local package count as such: diffusers gives them a row's first keys, which are others than the
  unmasked ones where padding is not last (Qwen-Image).
- `trains` is false where diffusers calls a kernel without a backward.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
    splits: bool = False
    """False: diffusers refuses it, or its backward, where devices share a row's tokens."""
    splits_masks: bool = False
    """Takes masks there, too. False for cuDNN's: diffusers hands it a mask of booleans as numbers to add."""


_FLASH = Package("flash_attn", "flash-attn", (2, 6, 3))
_FLASH_3 = Package("flash_attn_3", "flash-attn-3")
_HUB = Package("kernels", "kernels", (0, 12))

ATTENTION_BACKENDS: Mapping[str, AttentionBackend] = {
    NATIVE: AttentionBackend((), takes_masks=True, takes_fp32=True, splits=True, splits_masks=True),
    "flash": AttentionBackend(package=_FLASH, splits=True),
    "flash_hub": AttentionBackend(package=_HUB, splits=True),
    "flash_varlen": AttentionBackend(package=_FLASH),
    "flash_varlen_hub": AttentionBackend(package=_HUB, takes_masks=True, splits=True, splits_masks=True),
    "flash_4_hub": AttentionBackend(package=Package("kernels", "kernels", (0, 12, 3))),
    "_flash_3": AttentionBackend(package=_FLASH_3, trains=False),
    "_flash_varlen_3": AttentionBackend(package=_FLASH_3),
    "_flash_3_hub": AttentionBackend(package=_HUB, splits=True),
    "_flash_3_varlen_hub": AttentionBackend(package=_HUB, takes_masks=True, splits=True, splits_masks=True),
    "aiter_fa2_hub": AttentionBackend(package=_HUB),
    "_native_cudnn": AttentionBackend(takes_masks=True, splits=True),
    "_native_efficient": AttentionBackend(takes_masks=True, takes_fp32=True),
    "_native_flash": AttentionBackend(("cuda", "cpu"), splits=True),
    "_native_math": AttentionBackend((), takes_masks=True, takes_fp32=True),
    "_native_npu": AttentionBackend(("npu",), Package("torch_npu", "torch-npu"), takes_masks=True),
}
"""Name -> kernel. diffusers' others are not here: SageAttention quantizes queries and keys, so log-probs would be those
of another policy, and has no backward; the rest has not been asked for."""
