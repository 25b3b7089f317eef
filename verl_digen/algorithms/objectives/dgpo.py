# SPDX-License-Identifier: Apache-2.0
"""`dgpo`: direct group preference. A sample's flow error is weighed by its advantage, and each group by how far it is
from the order that its rewards ask for. Needs final latents alone.

A group's logit at a point, S = beta / G sum A (e - e_ref), is below 0 where the policy fits better samples better than
the reference does; its weight sigmoid(S) then falls. The rows of a group are compared under one noise. A row whose
ratio exp(e_old - e) has moved too far from the policy that generates keeps its value and loses its gradient.

Source: DGPO, arXiv 2510.08425, and its code. Its KL, mean[(v - v_ref)^2], is `digen.kl` with kind velocity.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from verl_digen.algorithms.ema import Decay
from verl_digen.algorithms.objectives.matching import ERRORS, error_gain, flow_error, sums_together
from verl_digen.algorithms.objectives.objective import ClampedConfig, Joint, JointRows, register_objective
from verl_digen.algorithms.objectives.ratio import clamped_advantage, ratio_metrics, ratio_of
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.require import In

WEIGHT = "group_weight"
"""Column: sigmoid(S) of the row's group at the row's point, in (0, 1)."""


@dataclass(frozen=True)
class DgpoConfig(ClampedConfig):
    beta: Annotated[float, In("(0, inf)")] = 100.0
    """Scale of a group's logit. 100 (OCR, GenEval), 10 (PickScore), 2000 with the old policy as the reference."""
    clip: Annotated[float, In("(0, inf]"), "inf (in a file .inf) never clips"] = 1e-2
    """Drop a row's gradient if its ratio is further from 1. 1e-2 with guidance, 1e-3 without; .inf: off."""

    switch_step: Annotated[int, In("[0, inf]"), "200 is DGPO's"] = 0
    """Up to this optimizer step `old` is a copy of the current policy, afterwards an EMA with decay min(0.001 k, 0.3).
    200 in DGPO's code, 500 for GenEval; 0: always the EMA."""

    @property
    def clip_widths(self) -> Mapping[str, float]:
        return {"clip": self.clip} if self.clip < math.inf else {}

    @property
    def copies(self) -> Mapping[str, Decay]:
        return {"old": Decay(0.001, 0.3, copied_until=self.switch_step)}


def group_weights(rows: JointRows, config: DgpoConfig) -> Tensor:
    """[M] sigmoid of the logit of each row's group at its point; G is the number of the group's rows there."""
    advantage = rows.advantages.clamp(-config.advantage_clip, config.advantage_clip)
    sums, counts = sums_together(advantage * rows.scalars, rows.groups, rows.points)
    return (config.beta * sums / counts).sigmoid()


@register_objective(
    "dgpo",
    config=DgpoConfig,
    points="forward",
    columns=("advantage", WEIGHT),
    latents=("clean", "noise", "velocity", "old_velocity"),
    behaviour="old",
    off_policy=True,
    shares_noise=True,
    joint=Joint(WEIGHT, (), scalar=error_gain, combine=group_weights, latents=ERRORS, needs_groups=True),
)
def group_preference(rows: LossInputs, config: DgpoConfig) -> LossOutput:
    """mean[w A e]: the gradient of -logsigmoid(-S), summed over groups, over beta. Clipped rows: mean[w A sg(e)]."""
    error, advantage = flow_error(rows, "velocity"), clamped_advantage(rows, config)
    log_ratio = (flow_error(rows, "old_velocity") - error).detach()
    ratio, low, high = ratio_of(log_ratio), 1 - config.clip, 1 + config.clip
    is_clipped = torch.where(advantage > 0, ratio > high, ratio < low)
    kept = torch.where(is_clipped, error.detach(), error)
    metrics = ratio_metrics(rows, log_ratio, low, high) | {
        "group_weight": rows.mean_metric(rows[WEIGHT]),
        "dropped_fraction": rows.mean_metric(is_clipped.float()),
        "flow_error": rows.mean_metric(error),
    }
    return LossOutput(rows.mean(rows[WEIGHT].detach() * advantage * kept), metrics)
