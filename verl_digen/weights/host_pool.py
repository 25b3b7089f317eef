# SPDX-License-Identifier: Apache-2.0
"""Host memory for copies of device tensors: page-locked where there is an accelerator, so that copies are asynchronous.

PyTorch rounds page-locked allocations up to a power of two. So tensors share chunks that are one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK_BYTES = 256 << 20
"""Size of a chunk; a larger tensor has a chunk of its own."""
ALIGNMENT_BYTES = 64
"""Each tensor starts at a multiple of it; larger than any number."""


class HostPool:
    """Allocates tensors that live as long as the pool.

    Args:
        is_pinned: page-lock the memory; needs an accelerator.
        chunk_bytes: see `CHUNK_BYTES`.

    Example:
        pool = HostPool(is_pinned=False)
        pool.empty_like(torch.zeros(3, device=device))   # on the CPU; pool.num_bytes == CHUNK_BYTES
    """

    def __init__(self, *, is_pinned: bool, chunk_bytes: int = CHUNK_BYTES):
        self._is_pinned = is_pinned
        self._chunk_bytes = chunk_bytes
        self._free = torch.empty(0, dtype=torch.uint8)
        self.num_bytes = 0
        """Bytes allocated, in whole chunks."""

    def empty_like(self, tensor: Tensor) -> Tensor:
        """An uninitialised contiguous tensor on the CPU of the same shape and dtype."""
        size = math.ceil(tensor.nbytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if size > len(self._free):
            chunk_bytes = max(size, self._chunk_bytes)
            self._free = torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
            self.num_bytes += chunk_bytes
        taken, self._free = self._free[:size], self._free[size:]
        return taken[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def pool_for(device: torch.device) -> HostPool:
    """A pool for copies of tensors on `device`."""
    return HostPool(is_pinned=device.type != "cpu")
