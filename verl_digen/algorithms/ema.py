# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average of the weights: ema <- decay * ema + (1 - decay) * weights.

`digen.ema`, for validation and export, has the decay `ema_decay`, which grows, to forget the untrained weights
(Flow-GRPO: every 8th step, `max_decay` 0.9). A policy that an objective names has its settings' `Decay` (DiffusionNFT,
arXiv 2509.16117).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decay:
    """Decay of an EMA copy: 0 up to optimizer step `start`, then `slope` more each step.

    Example:
        Decay(0.001, 0.3).at(200)              # 0.2
        Decay(0.001, 0.3, copied_until=200).at(200)  # 0.0, and 0.201 at step 201
        Decay(0.0, 0.0, every=40).is_due(39, 41)     # True: a copy of the weights, renewed after every 40th step
    """

    slope: float
    most: float
    """Largest value. 0: the policy is always a copy."""
    start: int = 0
    copied_until: int = 0
    """Up to this optimizer step it is a copy, whatever `slope` says."""
    every: int = 1
    """Optimizer steps from one update to the next."""

    def at(self, k: int) -> float:
        """Decay after k optimizer steps: min(slope * max(k - start, 0), most), 0 up to `copied_until`."""
        return 0.0 if k <= self.copied_until else min(self.slope * max(k - self.start, 0), self.most)

    def is_due(self, before: int, k: int) -> bool:
        """True if an update falls into the optimizer steps after the first `before` of k."""
        return k // self.every > before // self.every


def ema_decay(k: int, max_decay: float) -> float:
    """min((1 + k) / (10 + k), max_decay), for k >= 0 optimizer steps and max_decay in [0, 1]."""
    return min((1 + k) / (10 + k), max_decay)


@torch.no_grad()
def ema_update_(ema_tensors: Iterable[Tensor], tensors: Iterable[Tensor], decay: float) -> None:
    """Move each EMA tensor, or shard, towards its weight, in place; the weight is cast to its dtype and device."""
    for ema, tensor in zip(ema_tensors, tensors, strict=True):
        ema.lerp_(tensor.to(ema.device, ema.dtype), 1 - decay)
