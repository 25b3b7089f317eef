# SPDX-License-Identifier: Apache-2.0
"""Frozen weights in int8 under an adapter (`actor_rollout_ref.model.int8_base`): one byte a parameter in place of two.

- A weight [out, in] is int8 x one scale per output channel: its largest number / 127, rounded to bf16. The layers are
  the `nn.Linear` of the blocks that repeat. Biases, norms and what is outside the blocks stay as they are.
- A layer multiplies its weight out in forward and again in backward, for which autograd keeps the int8 alone.
- int8 and scales are buffers: FSDP2 neither shards nor gathers them, verl sends rank 0's to the other ranks, and
  no checkpoint holds them. Adapters are saved for the checkpoint's own weights.

Invariant (tests/engine/test_int8.py): output and gradients equal a linear layer's with the weight multiplied out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl_digen.models.kernels import repeated_linears

LARGEST = 127
SMALLEST = 1e-12
"""Least largest number of a channel: channels of zeros have a scale, too."""


def store_int8(module: nn.Module) -> None:
    """Turn the linear layers of all networks of `module`, on any device, into `Int8Linear`, one after the other."""
    for layer in repeated_linears(module):
        _store(layer)


def _store(layer: nn.Linear) -> None:
    number, scale = _quantised(layer.weight.detach())
    del layer.weight
    layer.register_buffer("weight", number, persistent=False)
    layer.register_buffer("scale", scale, persistent=False)
    layer.__class__ = Int8Linear


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    if weight.is_meta:  # a plan makes hundreds: there is nothing to calculate
        return torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight), 1, dtype=torch.bfloat16)
    weight = weight.float()
    scale = (weight.abs().amax(1, keepdim=True).clamp_min(SMALLEST) / LARGEST).to(torch.bfloat16)
    return (weight / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


class Int8Linear(nn.Linear):
    """A linear layer whose frozen weight is int8 [out, in] x `scale` [out, 1]; made by `store_int8`."""

    scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self.weight, self.scale, self.bias)  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """`F.linear` with a weight that is multiplied out in forward and in backward, and kept in between as int8."""

    @staticmethod
    def forward(rows: Tensor, number: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(rows, number * scale.to(rows.dtype), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.number, ctx.scale, _ = inputs  # no saved tensors, which hooks would count or move to the host

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return gradient @ (ctx.number * ctx.scale.to(gradient.dtype)), None, None, None
