# SPDX-License-Identifier: Apache-2.0
"""Random weights of a published size: for measurements of speed and memory where nothing can be downloaded.

`checkpoint.load_network` draws the weights of a folder that holds `MARKER` beside its config, the same in every
process. A network of 41 GB then takes no room on a disk. Norms are 1, biases 0, all else is normal numbers.
"""

from __future__ import annotations

from functools import cache
from zlib import crc32

import torch
from torch import Tensor, nn

MARKER = "RANDOM_WEIGHTS"
"""File in a network's folder: its weights are drawn when it is loaded."""
STD = 0.02
NUM_DRAWN = 1 << 24
"""Numbers that are drawn; the tensors of a network repeat them, each from a place of its own."""


def fill(network: nn.Module) -> nn.Module:
    """Give every parameter on the meta device a value on the CPU."""
    drawn = {
        name: draw(name, parameter.shape, parameter.dtype)
        for name, parameter in network.named_parameters()
        if parameter.is_meta
    }
    network.load_state_dict(drawn, strict=False, assign=True)
    return network


def draw(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The value of one tensor, a function of its name and shape."""
    value = torch.empty(shape, dtype=dtype)
    if value.ndim < 2:
        return value.fill_(1.0 if name.endswith("weight") else 0.0)
    rest, place = value.view(-1), crc32(name.encode()) % NUM_DRAWN
    while len(rest):
        part = _drawn(dtype)[place : place + len(rest)]
        rest[: len(part)] = part
        rest, place = rest[len(part) :], 0
    return value


@cache
def _drawn(dtype: torch.dtype) -> Tensor:
    return torch.randn(NUM_DRAWN, generator=torch.Generator().manual_seed(7)).mul_(STD).to(dtype)
