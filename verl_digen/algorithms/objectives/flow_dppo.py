# SPDX-License-Identifier: Apache-2.0
"""`flow_dppo`: a trust region by the divergence of the step's Gaussians, in place of PPO's clip.

A row is left out where its policy has moved too far from the one before the update, and the gradient would move it
farther; the ratio itself, one noisy number, decides the direction alone.

Source: Flow-DPPO, as in verl-omni's FlowDPPOLoss.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from verl_digen.algorithms.objectives.objective import OLD, LossConfig, register_objective
from verl_digen.algorithms.objectives.ratio import ratio_metrics, ratio_of
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.algorithms.sde import gaussian_kl
from verl_digen.require import In


@dataclass(frozen=True)
class FlowDppoConfig(LossConfig):
    """Settings of `flow_dppo`; it does not clamp advantages."""

    kl_threshold: Annotated[float, In("(0, inf)")] = 1e-5
    """Rows with at least this divergence train only if they move back."""


@register_objective(
    "flow_dppo",
    config=FlowDppoConfig,
    columns=("log_prob", OLD, "advantage", "std"),
    latents=("mean", "old_mean"),
    homogeneous=True,
)
def divergence_bounded(rows: LossInputs, config: FlowDppoConfig) -> LossOutput:
    """mean over all rows of -A r, r = exp(log_prob - old_log_prob), without those left out: where D >= kl_threshold and
    (A > 0 and r > 1, or A < 0 and r < 1), D = mean[(mu - mu_old)^2] / (2 std^2)."""
    advantage, log_ratio = rows["advantage"], rows["log_prob"] - rows[OLD]
    ratio = ratio_of(log_ratio)
    with torch.no_grad():
        divergence = gaussian_kl(rows["mean"], rows["old_mean"], rows["std"])
        moves_away = ((advantage > 0) & (ratio > 1)) | ((advantage < 0) & (ratio < 1))
        is_left_out = (divergence >= config.kl_threshold) & moves_away
    metrics = ratio_metrics(rows, log_ratio, 0.0, math.inf) | {
        "clip_fraction": rows.mean_metric(is_left_out.float()),
        "divergence": rows.mean_metric(divergence),
        "divergence_max": rows.max_metric(divergence),
    }
    return LossOutput(rows.mean(torch.where(is_left_out, 0.0, -advantage * ratio)), metrics)
