# SPDX-License-Identifier: Apache-2.0
"""A checksum of weights that does not depend on how they are cut into tensors, nor on their order.

The numbers' bit patterns are added up as integers, modulo 2**64. So fusing q, k and v into one tensor keeps it, and
losing, doubling or changing a number does not (a swap of two numbers does: names and shapes are compared beside it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from verl_digen.weights.probe import decides, network_of

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


class DecidingChecksums:
    """The checksum of each network's tensors that decide what it computes (`verl_digen.weights.probe.decides`).

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
        """Count `tensor` if it decides, and say whether it does. Nothing waits for the device here."""
        if counts := decides(name):
            self._sums[network_of(name, self._networks)].add(tensor)
        return counts

    @property
    def values(self) -> tuple[int, ...]:
        """For each network, in [0, 2**64); waits for the device."""
        return tuple(total.value for total in self._sums)


def checksum(tensors: Iterable[Tensor]) -> int:
    """`Checksum` of all `tensors`."""
    total = Checksum()
    for tensor in tensors:
        total.add(tensor)
    return total.value
