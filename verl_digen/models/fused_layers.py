# SPDX-License-Identifier: Apache-2.0
"""Layers of diffusers and peft in fewer kernels, turned into ours in place: RMS norms, and linear layers with a LoRA
adapter.

diffusers' RMS norm is a chain of kernels that keeps fp32 copies for backward; PyTorch's is one kernel on a GPU. peft
computes `base(x) + B(A(x)) * scale`: the layer's output is written by B's product, read and written by the scale,
and read twice and written once more by the sum; backward scales a gradient of the same size. Here B's product adds to
the base layer's output in place (`addmm`), and backward scales factors of the adapter's rank.

Invariants (tests/models/test_fused_layers.py): outputs and gradients equal fp64's, those in bf16 are nearer to it than
diffusers' and peft's, and forwards are bitwise the same with and without gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.normalization import RMSNorm
from peft.tuners.lora import Linear
from torch import Tensor, nn


def fuse_norms(network: nn.Module) -> None:
    """Turn diffusers' RMS norms in `network` into PyTorch's."""
    for module in network.modules():
        if type(module) is RMSNorm:
            module.__class__ = FusedNorm


class FusedNorm(RMSNorm):
    """diffusers' RMS norm, computed by PyTorch's; made by `fuse_norms`."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.weight is not None and self.weight.dtype != hidden_states.dtype:  # the output has another dtype
            return super().forward(hidden_states)  # type: ignore[no-any-return]
        found = F.rms_norm(hidden_states, self.dim, self.weight, self.eps)
        return found if self.bias is None else found + self.bias


def fuse_adapter(network: nn.Module) -> None:
    """Turn peft's plain LoRA layers into `LoraLinear`: all but those with dropout, a bias of B, or a variant (DoRA)."""
    for layer in network.modules():
        if type(layer) is not Linear or layer.lora_variant or any(layer.lora_bias.values()):
            continue
        if all(type(dropout) is nn.Identity for dropout in layer.lora_dropout.values()):
            layer.__class__ = LoraLinear


class LoraLinear(Linear):
    """peft's layer with another forward; made by `fuse_adapter`. Several adapters at once, compiled code, and an
    adapter in another dtype than the layer's input take peft's own."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name, *others = self.active_adapters
        is_off = self.disable_adapters or self.merged or name not in self.lora_A
        if is_off or others or kwargs or torch.compiler.is_compiling() or self.lora_A[name].weight.dtype != x.dtype:
            return super().forward(x, *args, **kwargs)
        # of two dimensions, so that the output is no view: in place it would cost copies in backward
        rows = x.reshape(-1, x.shape[-1])
        factors = self.lora_A[name].weight, self.lora_B[name].weight
        output = _Sum.apply(self.base_layer(rows), rows, *factors, self.scaling[name])
        return output.view(*x.shape[:-1], output.shape[-1])


class _Sum(torch.autograd.Function):
    """output [N, O] + scale * rows [N, I] Aᵀ Bᵀ, in place of `output`; A [R, I], B [O, R]."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, rows: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        inner = F.linear(rows, down)
        ctx.save_for_backward(rows, inner, down, up)
        ctx.scale = scale
        ctx.mark_dirty(output)
        return output.addmm_(inner, up.t(), alpha=scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, None]:  # type: ignore[override]
        rows, inner, down, up = ctx.saved_tensors
        inward = _product(gradient, up, ctx.scale)
        to_rows = inward @ down if ctx.needs_input_grad[1] else None
        return gradient, to_rows, inward.t() @ rows, _product(gradient.t(), inner, ctx.scale), None


def _product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale * left @ right, rounded once."""
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale)
