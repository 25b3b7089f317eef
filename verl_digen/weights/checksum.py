# SPDX-License-Identifier: Apache-2.0
"""Checksum of weights that does not depend on how they are split into tensors, nor on their order.

The sum of the numbers' bit patterns as integers, modulo 2**64. Fusing q, k and v into one tensor keeps it; losing,
duplicating or changing a number changes it. A swap of two numbers keeps it: names and shapes are compared, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_digen.weights.probe import decides, network_of

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


class DecidingChecksums:
    """Per network, the checksum of the tensors that decide its output (`verl_digen.weights.probe.decides`).

    Args:
        networks: see `verl_digen.weights.probe.network_of`.

    Example:
        sums = DecidingChecksums(["transformer"])
        sums.add("proj_out.lora_A.weight", torch.tensor([2.0]))   # decides nothing
        sums.add("proj_out.lora_B.weight", torch.tensor([1.0]))   # sums.values == (0x3f800000,)
    """

    def __init__(self, networks: Sequence[str]):
        self._networks = tuple(networks)
        self._sums = tuple(Checksum() for _ in networks)

    def add(self, name: str, tensor: Tensor) -> bool:
        """Add `tensor` if it decides -> True if it does. Does not synchronise with the device."""
        if counts := decides(name):
            self._sums[network_of(name, self._networks)].add(tensor)
        return counts

    @property
    def values(self) -> tuple[int, ...]:
        """One checksum per network, in [0, 2**64); synchronises with the device."""
        return tuple(total.value for total in self._sums)


def checksum(tensors: Iterable[Tensor]) -> int:
    """`Checksum` of all `tensors`."""
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
