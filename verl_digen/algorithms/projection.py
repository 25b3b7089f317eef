# SPDX-License-Identifier: Apache-2.0
"""A fixed ±1 projection of named tensors: one number that tells directions apart, where a norm tells lengths.

    p = sum over tensors and their elements [i, j, ...] of sign(name, 0, i) sign(name, 1, j) ... * element

- A sign depends only on the tensor's name, an axis and the element's number on it in the whole tensor. So a sharded
  tensor is projected shard by shard: the shards' projections sum to the whole's, however it is sharded. And it costs
  little more than reading the tensor: signs are made per row and column, not per element.
- The projections of two tensors differ by about the norm of the tensors' difference: the mean square over random signs
  is the squared norm.

Invariants (tests/algorithms/test_projection.py): shards add up to the whole; linear; a permutation changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

ODD_1, ODD_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47
"""Multipliers of splitmix64 (Steele, Lea, Flood 2014), as signed integers."""


def signs(name: str, numbers: Tensor) -> Tensor:
    """[...] int64 numbers of rows, say, of what has this name -> [...] fp32 signs, 1 or -1, on the same device."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    mixed = numbers * ODD_1 + seed  # int64 wraps around
    mixed = (mixed ^ (mixed >> 30)) * ODD_2
    mixed = mixed ^ (mixed >> 27)
    return 1.0 - 2.0 * (mixed * ODD_1 < 0).float()


@torch.no_grad()
def project(name: str, shard: Tensor, offset: Sequence[int] | None = None) -> Tensor:
    """Share of `shard` in the projection of the tensor `name`: [] fp32 (fp64 for an fp64 tensor), on its device.

    Args:
        offset: position of the shard's first element in the whole tensor; None: `shard` is the whole.
    """
    total = shard.to(torch.promote_types(shard.dtype, torch.float32))
    for axis in reversed(range(shard.dim())):
        numbers = torch.arange(shard.shape[axis], device=shard.device) + (offset[axis] if offset else 0)
        total = total @ signs(f"{name} {axis}", numbers).to(total.dtype)
    return total
