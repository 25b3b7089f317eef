# SPDX-License-Identifier: Apache-2.0
"""`longcat`: PPO's clip, with steps weighted so that their gradients are alike. Sources: LongCat-Video (arXiv
2510.22200), as in GenRL's trainer for Wan.

Under law `flow` the gradient of a step's log-prob is proportional to sqrt(-dt) / sqrt(sigma / (1 - sigma)): short steps
and steps at high noise hardly train. So a row's loss is multiplied by the inverse, k (`sde.step_weight`). k is the
row's own; published code takes the mean over a micro-batch, which is the same where its rows are of one step, as with
its window of size 1.

The KL term of the same recipe is `digen.kl.kind=longcat`, a term of its own, so that this loss stays proportional to
the advantage, and groups train as they complete.
"""

from dataclasses import dataclass

import torch

from verl_digen.algorithms.objectives.objective import OLD, ClipConfig, register_objective
from verl_digen.algorithms.objectives.ratio import clipped
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.algorithms.sde import STEP_WEIGHT_LAWS, step_weight


@dataclass(frozen=True)
class LongcatConfig(ClipConfig):
    clip_range: float = 1e-3
    """Clip of the ratio: 1e-3 in GenRL, for Wan."""


@register_objective(
    "longcat",
    config=LongcatConfig,
    columns=("log_prob", OLD, "advantage", "sigma", "sigma_next", "sigma_max"),
    homogeneous=True,
    laws=STEP_WEIGHT_LAWS,
)
def reweighted_ratio(rows: LossInputs, config: LongcatConfig) -> LossOutput:
    """mean[k max(-A r, -A clamp(r, 1 - c, 1 + c'))], r = exp(log_prob - old_log_prob)."""
    per_row, metrics = clipped(rows, config, rows["log_prob"] - rows[OLD])
    weight = torch.where(rows.is_row, step_weight(rows["sigma"], rows["sigma_next"], rows["sigma_max"]), 0.0)
    return LossOutput(rows.mean(weight * per_row), metrics | {"step_weight": rows.mean_metric(weight)})
