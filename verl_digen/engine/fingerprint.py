# SPDX-License-Identifier: Apache-2.0
"""Fingerprint of frozen weights: tells base weights apart that are not the same, cheap at 20 billion parameters.

Invariant (tests/engine/test_resharding.py): `first_fingerprint` of ranks that shard in any way is the
`frozen_fingerprint` of rank 0 of those that saved.
"""

from __future__ import annotations

from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_digen.engine.saved_ranks import laid_out, live_part
from verl_digen.engine.shadow import local_shard

FINGERPRINT_NUMBERS = 8
"""Numbers of each frozen shard in its fingerprint."""
ABSENT = torch.iinfo(torch.int32).min
"""Stands for the bits of a number on ranks that do not have it: the smallest of all, so that a maximum drops it."""


@torch.no_grad()
def frozen_fingerprint(module: nn.Module) -> str:
    """Hash of the first numbers of this rank's frozen shards."""
    shards = (local_shard(value) for value in module.parameters() if not value.requires_grad)
    return _hash([shard.flatten()[:FINGERPRINT_NUMBERS].float() for shard in shards if shard.numel()])


@torch.no_grad()
def first_fingerprint(module: nn.Module, layout: Tensor | None) -> str:
    """`frozen_fingerprint` of the first rank of a run whose tensors were distributed as `layout`; collective.

    Args:
        layout: None or a plain tensor: it had whole tensors.
    """
    heads = []
    for value in module.parameters():
        if value.requires_grad:
            continue
        first = value.shape
        if isinstance(layout, DTensor):
            first = laid_out(value.shape, layout.device_mesh.mesh, layout.placements)[0].sizes
        heads.append(_head(value, min(FINGERPRINT_NUMBERS, first.numel())))
    if not heads:
        return ""
    bits = torch.cat(heads)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX)
    return _hash([bits.view(torch.float32)])


def _head(value: Tensor, num_numbers: int) -> Tensor:
    """Bits of the first numbers of a tensor in fp32; `ABSENT` for those that other ranks have. Shards are rows."""
    shard, part = local_shard(value).flatten(), live_part(value)
    bits = torch.full((num_numbers,), ABSENT, dtype=torch.int32, device=shard.device)
    first = part.offsets[0] * value.shape[1:].numel() if value.ndim and shard.numel() else num_numbers
    here = shard[: max(0, num_numbers - first)].float()
    bits[first : first + len(here)] = here.view(torch.int32)
    return bits


def _hash(heads: list[Tensor]) -> str:
    return sha256(torch.cat(heads).cpu().numpy().tobytes()).hexdigest() if heads else ""
