# SPDX-License-Identifier: Apache-2.0
"""`grpo_guard`: PPO's clip of a ratio that is centred and scaled alike at all noise levels. Source: GRPO-Guard, arXiv
2510.22319.

Under law `flow` the mean of log r lies below 0, by b, and its spread grows with 1 / std: clipping would act on some
steps alone, and on one side. So b is added, and the log-ratio is multiplied by std. Dividing by -dt makes the gradients
of the steps alike. b, std and dt are the row's own. Published code takes the mean of some of them over a micro-batch,
so its numbers depend on how a batch is cut; on one row at a time they are these.
"""

from dataclasses import dataclass

import torch

from verl_digen.algorithms.objectives.objective import OLD, ClipConfig, register_objective
from verl_digen.algorithms.objectives.ratio import clipped
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.algorithms.sde import gaussian_kl


@dataclass(frozen=True)
class GrpoGuardConfig(ClipConfig):
    clip_range: float = 2e-6
    """Clip of the scaled ratio: 2e-6 (OCR, GenEval), 4e-6 (PickScore)."""


@register_objective(
    "grpo_guard",
    config=GrpoGuardConfig,
    columns=("log_prob", OLD, "advantage", "std", "sigma", "sigma_next"),
    latents=("mean", "old_mean"),
    homogeneous=True,
    laws=("flow",),
)
def guarded_ratio(rows: LossInputs, config: GrpoGuardConfig) -> LossOutput:
    """mean[max(-A r, -A clamp(r, 1 - c, 1 + c')) / (sigma - sigma')], r = exp((log_prob - old_log_prob + b) std), b =
    mean[(mu - mu_old)^2] / (2 std^2)."""
    drift = gaussian_kl(rows["mean"], rows["old_mean"], rows["std"])
    per_row, metrics = clipped(rows, config, (rows["log_prob"] - rows[OLD] + drift) * rows["std"])
    step = torch.where(rows.is_row, rows["sigma"] - rows["sigma_next"], 1.0)
    return LossOutput(rows.mean(per_row / step), metrics | {"ratio_drift": rows.mean_metric(drift)})
