# SPDX-License-Identifier: Apache-2.0
"""A checksum of weights that does not depend on how they are cut into tensors, nor on their order.

The numbers' bit patterns are added up as integers, modulo 2**64. So fusing q, k and v into one tensor keeps it, and
losing, doubling or changing a number does not (a swap of two numbers does: names and shapes are compared beside it).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> the integer type that reads its bits."""


class Checksum:
    """Adds tensors up as they pass.

    Example:
        total = Checksum()
        total.add(torch.tensor([1.0]))   # hex(total.value) == "0x3f800000"
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self.num_tensors = 0

    def add(self, tensor: Tensor) -> None:
        """Nothing waits for the device here."""
        bits = tensor.detach().contiguous().view(-1).view(BITS[tensor.element_size()]).sum(dtype=torch.int64)
        self._sum = bits if self._sum is None else self._sum + bits.to(self._sum.device)
        self.num_tensors += 1

    @property
    def value(self) -> int:
        """In [0, 2**64); waits for the device."""
        return 0 if self._sum is None else int(self._sum) % 2**64


def checksum(tensors: Iterable[Tensor]) -> int:
    """`Checksum` of all `tensors`."""
    total = Checksum()
    for tensor in tensors:
        total.add(tensor)
    return total.value
