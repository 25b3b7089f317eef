# SPDX-License-Identifier: Apache-2.0
"""Copies to an accelerator and from it that it is not waited for.

PyTorch copies asynchronously from and to pinned memory alone, and only without a change of dtype or layout on the way.
A blocking copy waits until the accelerator has done all that is queued, which leaves it idle afterwards.

Invariants (tests/models/test_device.py): neither a denoise step nor a training tile of ours waits for the device, and
nothing that a replica does between the first step of a batch and the next batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on `device` in `dtype` (None: its own), as by `Tensor.to`, without waiting for the device."""
    tensor = tensor.to(dtype=dtype)
    if tensor.device.type != "cpu" or device.type in ("cpu", "meta"):
        return tensor.to(device)
    # the pinned copy is freed here, and PyTorch's allocator uses its memory again only when the copy is done
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


class HostCopies:
    """Copies of device tensors on the host: begun in the thread that computes, waited for in another one.

    Example:
        copies = HostCopies(device)
        pixels = copies.begin(frames)    # the host's tensor, whose numbers arrive later
        copies.end()                     # no further copy belongs to these
        copies.wait()                    # in another thread: pixels has its numbers
    """

    def __init__(self, device: torch.device):
        self._is_on_host = device.type in ("cpu", "meta")
        self._arrived: Any = None if self._is_on_host else torch.get_device_module(device).Event()

    def begin(self, tensor: Tensor) -> Tensor:
        """Copy in the order of the device's current stream -> the host's tensor; a tensor of the host itself."""
        if tensor.device.type == "cpu":
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def end(self) -> None:
        """Mark the end of the copies in the device's current stream."""
        if not self._is_on_host:
            self._arrived.record()

    def wait(self) -> None:
        """Return when all copies have arrived. Raises the error of a kernel before them."""
        if not self._is_on_host:
            self._arrived.synchronize()
