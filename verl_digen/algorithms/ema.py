# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average of the weights: ema <- decay * ema + (1 - decay) * weights.

The decay grows with k, so that the average soon forgets the untrained weights. When to update is the caller's
decision (Flow-GRPO: after every 8th optimizer step, k = optimizer steps before it, `max_decay` 0.9).
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def ema_decay(k: int, max_decay: float) -> float:
    """min((1 + k) / (10 + k), max_decay), for k >= 0 optimizer steps and max_decay in [0, 1]."""
    if k < 0:
        raise ValueError(f"k must be >= 0 optimizer steps, got {k}")
    if not 0 <= max_decay <= 1:
        raise ValueError(f"max_decay must lie in [0, 1], got {max_decay}")
    return min((1 + k) / (10 + k), max_decay)


@torch.no_grad()
def ema_update_(ema_tensors: Iterable[Tensor], tensors: Iterable[Tensor], decay: float) -> None:
    """Move each EMA tensor towards its weight, in place; the weight is cast to its dtype and device.

    Elementwise, so shards may be given as well as whole tensors. ValueError if their numbers differ.
    """
    for ema, tensor in zip(ema_tensors, tensors, strict=True):
        ema.lerp_(tensor.to(ema.device, ema.dtype), 1 - decay)
