# SPDX-License-Identifier: Apache-2.0
"""Losses for samples that an earlier version generated: `digen.staleness.max_versions` > 1 needs one of them.

Per row, with A the clamped advantage, sg[.] without gradient, and r = pi / pi_generation, the policy against the one
that generated the sample: r = exp(log_prob - behaviour_log_prob). The loss is the mean over rows.

| name | per row |
| --- | --- |
| `tis` | -sg[clamp(r, lo, hi)] A log_prob |
| `cispo` | -sg[clamp(r, 1 - a, 1 + b)] A log_prob; optionally 0 where PPO would clip |
| `topr` | -A log_prob where the reward is positive, else -sg[clamp(r, 0, 1)] A log_prob |
| `weighted_topr` | the two parts of `topr`, each with a weight |
| `decoupled_ppo` | sg[min(pi_old / pi_generation, cap)] max(-A q, -A clamp(q, 1 - c, 1 + c')), q = pi / pi_old |
| `gspo` | max(-A s, -A clamp(s, 1 - c, 1 + c')), s = exp(mean log r over the trajectory's trained steps) |
| `kimi` | -A log_prob + tau / 2 (log_prob - behaviour_log_prob)^2 |
| `reinforce` | -A log_prob |

Sources. tis: Ionides 2008, as in ROLL; cispo: MiniMax-M1, arXiv 2506.13585; topr: arXiv 2503.14286; decoupled PPO:
Hilton et al., arXiv 2110.00641, as in AReaL, arXiv 2505.24298; gspo: arXiv 2507.18071; kimi: Kimi k1.5,
arXiv 2501.12599, with the group's mean reward as baseline, which is in A.

Log-probs are means over latent dims, so ratios are near 1 and bounds that are wide for tokens seldom bind here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_digen.algorithms.losses.config import LossConfig
from verl_digen.algorithms.losses.ratio import clamped_advantage, ppo_clip, ratio_metrics, ratio_of
from verl_digen.algorithms.losses.registry import BEHAVIOUR, OLD, TRAJECTORY, register_loss
from verl_digen.algorithms.rows import LossInputs, LossOutput


@register_loss("tis", columns=("log_prob", BEHAVIOUR, "advantage"), homogeneous=True, off_policy=True)
def truncated_importance_sampling(rows: LossInputs, config: LossConfig) -> LossOutput:
    """mean[-sg[clamp(r, tis_low, tis_high)] A log_prob]."""
    weight, metrics = _truncated_ratio(rows, config.tis_low, config.tis_high)
    return _weighted_reinforce(rows, config, weight, metrics)


@register_loss("cispo", columns=("log_prob", BEHAVIOUR, "advantage"), homogeneous=True, off_policy=True)
def clipped_weights(rows: LossInputs, config: LossConfig) -> LossOutput:
    """mean[-sg[m clamp(r, 1 - a, 1 + b)] A log_prob], a = cispo_low, b = cispo_high.

    m = 1; with `cispo_mask` 0 where A > 0 and r > 1 + b, or A < 0 and r < 1 - a: the rows that PPO's clip leaves
    without gradient.
    """
    low, high = 1 - config.cispo_low, 1 + config.cispo_high
    weight, metrics = _truncated_ratio(rows, low, high)
    if config.cispo_mask:
        ratio, advantage = ratio_of(_behaviour_log_ratio(rows)), rows["advantage"]
        is_clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        weight = torch.where(is_clipped, 0.0, weight)
    return _weighted_reinforce(rows, config, weight, metrics)


@register_loss("topr", columns=("log_prob", BEHAVIOUR, "advantage", "reward"), homogeneous=True, off_policy=True)
def tapered_reinforce(rows: LossInputs, config: LossConfig) -> LossOutput:
    """mean[-w A log_prob], w = 1 where the reward is above `topr_threshold`, else sg[clamp(r, 0, 1)]."""
    return _tapered(rows, config, positive_weight=1.0, negative_weight=1.0)


@register_loss(
    "weighted_topr", columns=("log_prob", BEHAVIOUR, "advantage", "reward"), homogeneous=True, off_policy=True
)
def weighted_tapered_reinforce(rows: LossInputs, config: LossConfig) -> LossOutput:
    """`topr` with w times `topr_positive_weight` and `topr_negative_weight`."""
    return _tapered(rows, config, config.topr_positive_weight, config.topr_negative_weight)


@register_loss("decoupled_ppo", columns=("log_prob", OLD, BEHAVIOUR, "advantage"), homogeneous=True, off_policy=True)
def decoupled_clip(rows: LossInputs, config: LossConfig) -> LossOutput:
    """PPO's clip against the policy before the update, weighted by its ratio to the policy that generated.

    mean[sg[min(exp(old_log_prob - behaviour_log_prob), decoupled_cap)] max(-A q, -A clamp(q, 1 - c, 1 + c'))],
    q = exp(log_prob - old_log_prob).
    """
    behaviour_ratio = ratio_of(rows[OLD] - rows[BEHAVIOUR]).detach()
    weight = behaviour_ratio.clamp(max=config.decoupled_cap)
    log_ratio = rows["log_prob"] - rows[OLD]
    clipped = ppo_clip(ratio_of(log_ratio), clamped_advantage(rows, config), config)
    metrics = ratio_metrics(rows, log_ratio, *config.ratio_range) | {
        "behaviour_weight": rows.mean(weight),
        "behaviour_ratio_max": rows.max(behaviour_ratio),
    }
    return LossOutput(rows.mean(weight * clipped), metrics)


@register_loss("gspo", columns=("log_prob", TRAJECTORY, "advantage"), homogeneous=True, off_policy=True)
def trajectory_clip(rows: LossInputs, config: LossConfig) -> LossOutput:
    """PPO's clip of the trajectory's ratio: mean[max(-A s, -A clamp(s, 1 - c, 1 + c'))].

    s = exp(`trajectory_log_ratio`) under the current weights, without gradient, because a trajectory's rows may lie in
    several tiles. s depends on the log-probs of all K rows of a trajectory, with weight 1 / K each, and K rows have the
    loss of s. So the gradient is that of K rows with s exp(log_prob - sg[log_prob]) in place of s (GSPO-token, with one
    advantage for all rows of a trajectory).
    """
    log_prob, log_ratio = rows["log_prob"], rows[TRAJECTORY]
    ratio = ratio_of(log_ratio.detach() + (log_prob - log_prob.detach()))
    per_row = ppo_clip(ratio, clamped_advantage(rows, config), config)
    return LossOutput(rows.mean(per_row), ratio_metrics(rows, log_ratio, *config.ratio_range))


def trajectory_log_ratios(log_ratio: Tensor, trajectories: Tensor) -> Tensor:
    """[N] log-ratios and [N] int ids -> [N]: each row has the mean over the rows of its trajectory.

    Example:
        trajectory_log_ratios(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([7, 7, 2]))  # 2, 2, 5
    """
    _, places, counts = trajectories.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=log_ratio.dtype, device=log_ratio.device).index_add(0, places, log_ratio)
    return (sums / counts)[places]


@register_loss("kimi", columns=("log_prob", BEHAVIOUR, "advantage"), off_policy=True)
def squared_log_ratio(rows: LossInputs, config: LossConfig) -> LossOutput:
    """mean[-A log_prob + tau / 2 (log_prob - behaviour_log_prob)^2], tau = `kimi_tau`; not homogeneous in A."""
    half_square = 0.5 * _behaviour_log_ratio(rows).square()
    per_row = -clamped_advantage(rows, config) * rows["log_prob"] + config.kimi_tau * half_square
    return LossOutput(rows.mean(per_row), {"approx_kl": rows.mean(half_square).detach()})


@register_loss("reinforce", columns=("log_prob", "advantage"), homogeneous=True, off_policy=True)
def reinforce(rows: LossInputs, config: LossConfig) -> LossOutput:
    """mean[-A log_prob], whichever policy generated the sample."""
    return LossOutput(rows.mean(-clamped_advantage(rows, config) * rows["log_prob"]), {})


def _behaviour_log_ratio(rows: LossInputs) -> Tensor:
    return rows["log_prob"] - rows[BEHAVIOUR]


def _truncated_ratio(rows: LossInputs, low: float, high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """(sg[clamp(r, low, high)] [N], metrics)."""
    log_ratio = _behaviour_log_ratio(rows).detach()
    return ratio_of(log_ratio).clamp(low, high), ratio_metrics(rows, log_ratio, low, high)


def _weighted_reinforce(rows: LossInputs, config: LossConfig, weight: Tensor, metrics: dict[str, Tensor]) -> LossOutput:
    return LossOutput(rows.mean(-weight * clamped_advantage(rows, config) * rows["log_prob"]), metrics)


def _tapered(rows: LossInputs, config: LossConfig, positive_weight: float, negative_weight: float) -> LossOutput:
    is_positive = rows["reward"] > config.topr_threshold
    truncated, metrics = _truncated_ratio(rows, 0.0, 1.0)
    weight = torch.where(is_positive, positive_weight, negative_weight * truncated)
    return _weighted_reinforce(rows, config, weight, metrics | {"positive_fraction": rows.mean(is_positive.float())})
