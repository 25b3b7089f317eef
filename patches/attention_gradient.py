# SPDX-License-Identifier: Apache-2.0
"""Hand attention gradients in the layout of its output.

Limitation:  cuDNN's attention, PyTorch's first choice on Hopper in half precision, keeps the plan of a backward by the
             shapes and strides of queries, keys and values (`MHAParams` in PyTorch's cudnn/MHA.cpp), not by those of
             the output's gradient. A gradient of a second layout is read at wrong places.
Effect:      without this, gradients of FLUX.1 and FLUX.2 are wrong there: queries are the same in their two kinds of
             blocks, and the gradient of one kind is a slice. Mostly they are finite, so that nothing else shows it.
Affects:     measured with PyTorch 2.11, cuDNN 9.19, H100 and H200: docs/gpu_results.md
Remove when: PyTorch keeps plans by that layout, too; tests/models/test_kernels.py::
             test_cudnn_reads_gradients_of_a_second_layout_at_wrong_places fails then, on a device
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def apply() -> None:
    """Wrap, in this process and once, diffusers' entries for the kernels with which PyTorch may call cuDNN."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    backends = _AttentionBackendRegistry._backends
    for kernel in (AttentionBackendName.NATIVE, AttentionBackendName._NATIVE_CUDNN):
        if not hasattr(backends[kernel], "__wrapped__"):
            backends[kernel] = _with_dense_gradient(backends[kernel])


def _with_dense_gradient(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(attend)
    def attend_with_dense_gradient(*args: Any, **kwargs: Any) -> Tensor:
        found = attend(*args, **kwargs)
        return _DenseGradient.apply(found) if found.requires_grad else found  # type: ignore[no-any-return]

    return attend_with_dense_gradient


class _DenseGradient(torch.autograd.Function):
    """Identity for [B, S, H, D], whose gradient is contiguous."""

    @staticmethod
    def forward(ctx: Any, found: Tensor) -> Tensor:
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.contiguous()
