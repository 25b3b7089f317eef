# SPDX-License-Identifier: Apache-2.0
"""Checksum of weights that does not depend on how they are split into tensors, nor on their order.

The sum of the numbers' bit patterns as integers, modulo 2**64. Fusing q, k and v into one tensor keeps it; losing,
duplicating or changing a number changes it. A swap of two numbers keeps it: names and shapes are compared, too.

It is the proof that an update took effect: after each one, the checksum read back from the module that generates must
equal the sender's. It needs no forward, so it holds for every objective; the log-prob gap compares precision and
kernels, and exists for recorded paths alone. Tests, not runs, compare samples after an update with the trainer's
network.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes per number -> integer dtype of the same width."""


class Checksum:
    """Running checksum of the tensors added.

    Example:
        total = Checksum()
        total.add(torch.tensor([1.0]))   # hex(total.value) == "0x3f800000"
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self.num_tensors = 0

    def add(self, tensor: Tensor) -> None:
        """Add a tensor; does not synchronise with the device."""
        bits = tensor.detach().contiguous().view(-1).view(BITS[tensor.element_size()]).sum(dtype=torch.int64)
        self._sum = bits if self._sum is None else self._sum + bits.to(self._sum.device)
        self.num_tensors += 1

    @property
    def value(self) -> int:
        """Checksum in [0, 2**64); synchronises with the device."""
        return 0 if self._sum is None else int(self._sum) % 2**64


def checksum(tensors: Iterable[Tensor]) -> int:
    total = Checksum()
    for tensor in tensors:
        total.add(tensor)
    return total.value


@dataclass(frozen=True)
class Manifest:
    """Summary of the tensors of a weight update, sent after the last of them by the sending rank, and compared with
    what arrived by the engine workers that load the update."""

    version: int
    """Weight version of the update."""
    num_tensors: int
    checksum: int
    """`Checksum` of all tensors as they were sent."""
