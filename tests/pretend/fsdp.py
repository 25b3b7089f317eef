# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on the pretend device: one of its functions assigns `tensor.data`, which cannot make a wrapper of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_init


def move_states_to_device(params: Sequence[Tensor], buffers: Sequence[Tensor], device: torch.device) -> None:
    """FSDP2's function of this name."""
    for tensor in (*params, *buffers):
        if tensor.device.type not in (device.type, "meta"):
            moved = tensor.detach().to(device)
            new = torch.nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else moved
            torch.utils.swap_tensors(tensor, new)


def adapt_fsdp() -> None:
    """Replace the function in this process."""
    _fsdp_init._move_states_to_device = move_states_to_device
