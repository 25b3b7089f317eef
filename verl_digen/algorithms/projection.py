# SPDX-License-Identifier: Apache-2.0
"""A fixed ±1 projection of named tensors: one number that tells directions apart, where a norm tells lengths.

    p = sum over tensors and their elements of sign(name, element's number) * element

- A sign depends only on the tensor's name and the element's number in the whole tensor. So a sharded tensor is
  projected shard by shard: the shards' projections sum to the whole's, however it is sharded.
- The projections of two tensors differ by about the norm of the tensors' difference: the mean square over random signs
  is the squared norm.

Invariants (tests/algorithms/test_projection.py): shards add up to the whole; linear; a permutation changes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 24
"""Elements whose signs are made at a time: 128 MB of numbers."""
ODD_1, ODD_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47
"""Multipliers of splitmix64 (Steele, Lea, Flood 2014), as signed integers."""


def signs(name: str, numbers: Tensor) -> Tensor:
    """[...] int64 element numbers of the tensor `name` -> [...] fp32 signs, 1 or -1, on the same device."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    mixed = numbers * ODD_1 + seed  # int64 wraps around
    mixed = (mixed ^ (mixed >> 30)) * ODD_2
    mixed = mixed ^ (mixed >> 27)
    return 1.0 - 2.0 * (mixed * ODD_1 < 0).float()


@torch.no_grad()
def project(
    name: str, shard: Tensor, shape: Sequence[int] | None = None, offset: Sequence[int] | None = None
) -> Tensor:
    """Share of `shard` in the projection of the tensor `name`: [] fp32 (fp64 for an fp64 tensor), on its device.

    Args:
        shape: shape of the whole tensor; None: `shard` is the whole.
        offset: position of the shard's first element in the whole.
    """
    sizes = list(shard.shape) or [1]
    wholes, starts = list(shape or []) or sizes, list(offset or []) or [0] * len(sizes)
    strides = [math.prod(wholes[axis + 1 :]) for axis in range(len(sizes))]
    # numbers of one row's elements, counted from the row's first
    inner = torch.zeros(1, dtype=torch.int64, device=shard.device)
    for size, start, stride in zip(sizes[1:], starts[1:], strides[1:], strict=True):
        inner = (inner[:, None] + (torch.arange(size, device=shard.device) + start) * stride).reshape(-1)
    dtype = torch.float64 if shard.dtype == torch.float64 else torch.float32
    rows = shard.reshape(sizes[0], -1) if shard.numel() else shard.reshape(0, 1)
    total = torch.zeros((), dtype=dtype, device=shard.device)
    done = 0
    for part in rows.split(max(1, CHUNK // rows.shape[1])) if len(rows) else ():
        firsts = (torch.arange(len(part), device=shard.device) + starts[0] + done) * strides[0]
        total += (signs(name, firsts[:, None] + inner) * part.to(dtype)).sum()
        done += len(part)
    return total
