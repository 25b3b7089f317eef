# SPDX-License-Identifier: Apache-2.0
"""Gradients of attention in bf16 on the device, as networks ask diffusers for it, against fp32.

A wrong one is mostly finite, and a run trains something else without a word: cuDNN's attention has such a fault in
PyTorch 2.11 (docs/gpu_results.md), and one with masks where tokens are 64 more than a multiple of 128.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor
from verl.plugin.platform import get_platform

from verl_digen.patches import attention_gradient
from verl_digen.tools.checkup.checks import CheckFailed, Setting
from verl_digen.weights.sending import own_device

TOKENS, HEADS, WIDTHS = 1088, 8, (64, 128)
MAX_ERROR = 0.02
"""Relative error of a gradient; in bf16 it is 0.003."""


def check_attention(setting: Setting) -> str:
    """Compare gradients of queries, keys and values in two layouts, with a mask and without.

    Raises:
        CheckFailed: one is beyond MAX_ERROR.
    """
    attention_gradient.apply()
    tokens = 192 if setting.is_cpu else TOKENS
    errors = {
        f"width {width}{', masked' * is_masked}": _error(tokens, width, is_masked)
        for width, is_masked in product(WIDTHS, (False, True))
    }
    setting.note("relative error of attention's gradient", **errors)
    wrong = [f"{what}: {error:.1e}" for what, error in errors.items() if error > MAX_ERROR]
    if wrong:
        raise CheckFailed(f"attention's gradient is off by {', '.join(wrong)}, at most {MAX_ERROR}")
    return f"gradients of attention differ by at most {max(errors.values()):.1e}"


def _error(tokens: int, width: int, is_masked: bool) -> float:
    """Largest relative error of a gradient; inf if one is not finite."""
    device = own_device(get_platform().device_name)
    generator = torch.Generator().manual_seed(7)
    *inputs, wide = (
        torch.randn(1, tokens, heads, width, generator=generator).to(device, torch.bfloat16)
        for heads in (HEADS, HEADS, HEADS, 5 * HEADS)
    )
    mask = (torch.arange(tokens, device=device) < tokens - 9)[None, None, None] if is_masked else None
    errors = []
    for gradient in (wide[:, :, :HEADS], wide[:, :, :HEADS].contiguous()):  # as of FLUX.1's two kinds of blocks
        found = _gradients(dispatch_attention_fn, inputs, mask, gradient)
        exact = _gradients(_attend, [one.float() for one in inputs], mask, gradient.float())
        errors += [((one - other).norm() / other.norm()).item() for one, other in zip(found, exact, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def _gradients(
    attend: Callable[..., Tensor], inputs: Sequence[Tensor], mask: Tensor | None, gradient: Tensor
) -> tuple[Tensor, ...]:
    leaves = [one.detach().requires_grad_() for one in inputs]
    return torch.autograd.grad(attend(*leaves, attn_mask=mask), leaves, gradient)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Attention [B, S, H, D] by its formula."""
    scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys) / math.sqrt(queries.shape[-1])
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)
