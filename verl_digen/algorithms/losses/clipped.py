# SPDX-License-Identifier: Apache-2.0
"""FlowGRPO's and DanceGRPO's loss."""

from __future__ import annotations

from verl_digen.algorithms.losses.config import LossConfig
from verl_digen.algorithms.losses.ratio import clamped_advantage, ppo_clip, ratio_metrics, ratio_of
from verl_digen.algorithms.losses.registry import register_loss
from verl_digen.algorithms.rows import LossInputs, LossOutput


@register_loss("flow_grpo", "dance_grpo", columns=("log_prob", "old_log_prob", "advantage"), homogeneous=True)
def clipped_ratio(rows: LossInputs, config: LossConfig) -> LossOutput:
    """PPO's clip: mean[max(-A r, -A clamp(r, 1 - c, 1 + c'))], r = exp(log_prob - old_log_prob)."""
    log_ratio = rows["log_prob"] - rows["old_log_prob"]
    per_row = ppo_clip(ratio_of(log_ratio), clamped_advantage(rows, config), config)
    return LossOutput(rows.mean(per_row), ratio_metrics(rows, log_ratio, *config.ratio_range))
