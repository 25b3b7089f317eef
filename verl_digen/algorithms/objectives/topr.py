# SPDX-License-Identifier: Apache-2.0
"""`topr` and `weighted_topr`: tapered off-policy REINFORCE. Source: arXiv 2503.14286."""

from dataclasses import dataclass
from typing import Annotated

import torch

from verl_digen.algorithms.objectives.objective import BEHAVIOUR, ClampedConfig, register_objective
from verl_digen.algorithms.objectives.ratio import truncated_ratio, weighted_reinforce
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.require import In


@dataclass(frozen=True)
class ToprConfig(ClampedConfig):
    threshold: Annotated[float, In("(-inf, inf)"), "digen.loss.name=reinforce or tis treats all samples alike"] = 0.0
    """Samples with a larger reward (the weighted sum, not centred) are positive. 0 in TOPR, whose rewards are +1 and
    -1. Choose it between your rewards: if all are above it topr equals reinforce, if all are below it equals tis."""
    positive_weight = negative_weight = 1.0


@dataclass(frozen=True)
class WeightedToprConfig(ToprConfig):
    positive_weight: Annotated[float, In("(0, inf)")] = 1.0
    """Weight of positive samples. 1 (ROLL), which is topr."""
    negative_weight: Annotated[float, In("[0, inf)")] = 1.0
    """Weight of other samples. 1 (ROLL), which is topr."""


DECLARED = {"columns": ("log_prob", BEHAVIOUR, "advantage", "reward"), "homogeneous": True, "off_policy": True}


@register_objective("weighted_topr", config=WeightedToprConfig, **DECLARED)
@register_objective("topr", config=ToprConfig, **DECLARED)
def tapered_reinforce(rows: LossInputs, config: ToprConfig) -> LossOutput:
    """mean[-w A log_prob], w = `positive_weight` where the reward is above `threshold`, else `negative_weight` times
    sg[clamp(r, 0, 1)], r = exp(log_prob - behaviour_log_prob). Both weights of `topr` are 1."""
    is_positive = rows["reward"] > config.threshold
    truncated, metrics = truncated_ratio(rows, 0.0, 1.0)
    weight = torch.where(is_positive, config.positive_weight, config.negative_weight * truncated)
    metrics["positive_fraction"] = rows.mean_metric(is_positive.float())
    return weighted_reinforce(rows, config, weight, metrics)
