# SPDX-License-Identifier: Apache-2.0
"""Copies to an accelerator and from it that it is not waited for, and tensors between processes.

PyTorch copies asynchronously from and to pinned memory alone, and only without a change of dtype or layout on the way.
A blocking copy waits until the accelerator has done all that is queued, which leaves it idle afterwards.

Invariants (tests/models/test_device.py): neither a denoise step nor a training tile of ours waits for the device, and
nothing that a replica does between the first step of a batch and the next batch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ray.util import register_serializer
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


def send_as_bytes() -> None:
    """Have Ray send this process's CPU tensors as bytes beside the pickle. PyTorch's own way, an archive per tensor,
    takes four times as long and sends all of a view's memory. The receiver gets memory of its own."""
    register_serializer(Tensor, serializer=_reduced, deserializer=_restored)


def _reduced(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad or tensor.is_quantized:
        return tensor.__reduce_ex__(4)  # type: ignore[return-value]
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return _from_bytes, (data, tensor.dtype, tensor.shape)


def _restored(reduced: tuple[Callable[..., Tensor], tuple[Any, ...]]) -> Tensor:
    function, arguments = reduced
    return function(*arguments)


def _from_bytes(data: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).numpy()[:] = data  # a copy: what Ray gives is read-only
    return tensor
