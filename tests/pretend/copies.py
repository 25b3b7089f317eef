# SPDX-License-Identifier: Apache-2.0
"""Copies between host and pretend device: which of them stall, and which arrive late.

As on CUDA: a copy is asynchronous if `non_blocking` is set and the host's side is pinned. To the device it must also be
contiguous and of the same dtype, as PyTorch first makes a pageable copy otherwise. `tensor.to("cpu",
non_blocking=True)` makes a pinned tensor.
"""

import weakref

import torch
from torch import Tensor

from tests.pretend.record import stall

GARBAGE_BYTE = 0xAB
"""Filling of a host buffer until its copy arrives."""

_pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
_late: list[tuple[Tensor, Tensor]] = []
"""(host buffer, numbers on their way), in the order of the stream."""


def pin(tensor: Tensor) -> Tensor:
    """Make the host tensor's storage count as pinned."""
    _pinned.add(tensor.untyped_storage())
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    """True if a host tensor is pinned."""
    return tensor.untyped_storage() in _pinned


def to_device(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Copy from the host; `target` is what a device tensor holds."""
    is_plain = source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()
    if not (non_blocking and is_plain and is_pinned(source)):
        wait("to device")
    target.copy_(source)


def to_host(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Copy to the host, at once or late; `source` is what a device tensor holds."""
    if non_blocking and is_pinned(target):
        numbers = source.to(target.dtype, copy=True)
        target.copy_(_garbage(target))
        # an alias: `module.to` swaps what the tensor objects of a module hold
        _late.append((target.detach(), numbers))
    else:
        wait("to host")
        target.copy_(source)


def wait(kind: str) -> None:
    """Stall until the device has done everything, so that all copies arrive."""
    stall(kind)
    arrive()


def arrive() -> None:
    """Deliver the copies on their way; other threads may begin some meanwhile."""
    while _late:
        buffer, numbers = _late.pop(0)
        buffer.copy_(numbers)


def _garbage(like: Tensor) -> Tensor:
    if like.dtype == torch.bool:
        return torch.ones_like(like)
    return (
        torch.full((like.numel() * like.element_size(),), GARBAGE_BYTE, dtype=torch.uint8)
        .view(like.dtype)
        .view(like.shape)
    )
