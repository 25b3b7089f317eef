# SPDX-License-Identifier: Apache-2.0
"""Copies to an accelerator that it is not waited for.

PyTorch copies asynchronously from pinned memory alone, and only without a change of dtype or layout on the way. A
blocking copy waits until the accelerator has done all that is queued, which leaves it idle afterwards.

Invariant (tests/models/test_device.py): neither a denoise step nor a training tile of ours waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on `device` in `dtype` (None: its own), as by `Tensor.to`, without waiting for the device."""
    tensor = tensor.to(dtype=dtype)
    if tensor.device.type != "cpu" or device.type in ("cpu", "meta"):
        return tensor.to(device)
    # the pinned copy is freed here, and PyTorch's allocator uses its memory again only when the copy is done
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
