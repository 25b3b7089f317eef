# SPDX-License-Identifier: Apache-2.0
"""Shared parts of losses with an importance ratio: the ratio, PPO's clip, and metrics of policy distance."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_digen.algorithms.losses.config import LossConfig
from verl_digen.algorithms.rows import LossInputs

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp (as verl does), so that no ratio is infinite: 0 from a clip times
infinity would be a NaN in the gradient. Beyond it a ratio has no gradient."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio; value and gradient are finite for any input."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clamped_advantage(rows: LossInputs, config: LossConfig) -> Tensor:
    """Advantages [N], clamped to +- `advantage_clip`."""
    return rows["advantage"].clamp(-config.advantage_clip, config.advantage_clip)


def ppo_clip(ratio: Tensor, advantage: Tensor, config: LossConfig) -> Tensor:
    """PPO's clip per row: max(-A r, -A clamp(r, 1 - c, 1 + c'))."""
    low, high = config.ratio_range
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))


@torch.no_grad()
def ratio_metrics(rows: LossInputs, log_ratio: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Metrics of the distance between the two policies of a ratio, from log-ratios [N].

    `ratio_deviation`, `_min`, `_max` are of r - 1 (r would round its digits away), `clip_fraction` the share of
    rows with r outside [low, high], `approx_kl` the mean of half the squared log-ratio.
    """
    ratio = ratio_of(log_ratio)
    deviation = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1()
    return {
        "ratio_deviation": rows.mean(deviation),
        "ratio_deviation_min": rows.min(deviation),
        "ratio_deviation_max": rows.max(deviation),
        "clip_fraction": rows.mean(((ratio < low) | (ratio > high)).float()),
        "approx_kl": rows.mean(0.5 * log_ratio.square()),
    }
