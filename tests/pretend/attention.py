# SPDX-License-Identifier: Apache-2.0
"""Notes the masks of attention calls: with one, an accelerator's fastest kernels are out of the question."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from tests.pretend.record import current, place
from tests.pretend.tensor import PretendTensor


def note_masks() -> None:
    """Replace PyTorch's attention in this process by itself and a note."""
    attention = functional.scaled_dot_product_attention

    def noting(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any):
        if isinstance(query, PretendTensor):
            record = current()
            record.num_attentions += 1
            if attn_mask is not None:
                record.masks[f"{list(attn_mask.shape)} {attn_mask.dtype}", place()] += 1
        return attention(query, key, value, attn_mask, *args, **kwargs)

    functional.scaled_dot_product_attention = noting
