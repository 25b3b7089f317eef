# SPDX-License-Identifier: Apache-2.0
"""Shared parts of losses with an importance ratio: the ratio, PPO's clip, weighted REINFORCE, metrics."""

import torch
from torch import Tensor

from verl_digen.algorithms.objectives.objective import BEHAVIOUR, ClampedConfig, ClipConfig
from verl_digen.algorithms.rows import LossInputs, LossOutput, Metric

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp (as verl does), so that no ratio is infinite: 0 from a clip times
infinity would be a NaN in the gradient. Beyond it a ratio has no gradient."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio; value and gradient are finite for any input."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clamped_advantage(rows: LossInputs, config: ClampedConfig) -> Tensor:
    """Advantages [N], clamped to +- `advantage_clip`."""
    return rows["advantage"].clamp(-config.advantage_clip, config.advantage_clip)


def ppo_clip(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """PPO's clip per row: max(-A r, -A clamp(r, low, high))."""
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))


def clipped(rows: LossInputs, config: ClipConfig, log_ratio: Tensor) -> tuple[Tensor, dict[str, Metric]]:
    """(`ppo_clip` of the ratio per row, at the bounds of the settings [N]; `ratio_metrics`), from log-ratios [N]."""
    bounds = config.ratio_range
    per_row = ppo_clip(ratio_of(log_ratio), clamped_advantage(rows, config), *bounds)
    return per_row, ratio_metrics(rows, log_ratio, *bounds)


def behaviour_log_ratio(rows: LossInputs) -> Tensor:
    """log_prob - behaviour_log_prob, [N]."""
    return rows["log_prob"] - rows[BEHAVIOUR]


def truncated_ratio(rows: LossInputs, low: float, high: float) -> tuple[Tensor, dict[str, Metric]]:
    """(sg[clamp(r, low, high)] [N], metrics), r = exp(log_prob - behaviour_log_prob)."""
    log_ratio = behaviour_log_ratio(rows).detach()
    return ratio_of(log_ratio).clamp(low, high), ratio_metrics(rows, log_ratio, low, high)


def weighted_reinforce(
    rows: LossInputs, config: ClampedConfig, weight: Tensor, metrics: dict[str, Metric]
) -> LossOutput:
    """mean[-w A log_prob]. `weight`: [N], without gradient."""
    return LossOutput(rows.mean(-weight * clamped_advantage(rows, config) * rows["log_prob"]), metrics)


@torch.no_grad()
def ratio_metrics(rows: LossInputs, log_ratio: Tensor, low: float, high: float) -> dict[str, Metric]:
    """Metrics of the distance between the two policies of a ratio, from log-ratios [N].

    `ratio_deviation`, `_min`, `_max` are of r - 1 (r would round its digits away), `clip_fraction` the share of
    rows with r outside [low, high], `approx_kl` the mean of half the squared log-ratio. `ratio_above_fraction` and
    `ratio_below_fraction` are shares of rows with r > 1 and r < 1. `ratio_sign_positive` and `_negative` are sums of
    the log-ratios' signs over rows with that sign of the advantage, per row of the batch; divided by the share of such
    rows, `advantage_positive_fraction` and `_negative_fraction`, they are means.
    """
    ratio, sign = ratio_of(log_ratio), log_ratio.sign()
    is_positive, is_negative = rows["advantage"] > 0, rows["advantage"] < 0
    deviation = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1()
    return {
        "ratio_deviation": rows.mean_metric(deviation),
        "ratio_deviation_min": rows.min_metric(deviation),
        "ratio_deviation_max": rows.max_metric(deviation),
        "clip_fraction": rows.mean_metric(((ratio < low) | (ratio > high)).float()),
        "approx_kl": rows.mean_metric(0.5 * log_ratio.square()),
        "ratio_above_fraction": rows.mean_metric((sign > 0).float()),
        "ratio_below_fraction": rows.mean_metric((sign < 0).float()),
        "ratio_sign_positive": rows.mean_metric(sign * is_positive),
        "ratio_sign_negative": rows.mean_metric(sign * is_negative),
        "advantage_positive_fraction": rows.mean_metric(is_positive.float()),
        "advantage_negative_fraction": rows.mean_metric(is_negative.float()),
    }
