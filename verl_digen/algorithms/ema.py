# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average of the weights: ema <- decay * ema + (1 - decay) * weights.

| average | decay | updated |
| --- | --- | --- |
| `digen.ema`, for validation and export | `ema_decay`: grows, to forget the untrained weights | every n steps |
| a policy that an objective names | its settings' `Decay` | once per batch |

Sources: Flow-GRPO (every 8th step, `max_decay` 0.9); DiffusionNFT, arXiv 2509.16117 (`Decay`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decay:
    """Decay of a policy that follows at a distance: 0 up to optimizer step `start`, then `slope` more each step."""

    slope: float
    most: float
    """Largest value. 0: the policy is always a copy."""
    start: int = 0

    def at(self, k: int) -> float:
        """Decay after k optimizer steps: min(slope * max(k - start, 0), most)."""
        return min(self.slope * max(k - self.start, 0), self.most)


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
