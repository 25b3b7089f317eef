# SPDX-License-Identifier: Apache-2.0
"""`cispo`: clipped importance weights. Source: MiniMax-M1, arXiv 2506.13585."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch

from verl_digen.algorithms.objectives.objective import BEHAVIOUR, ClampedConfig, register_objective
from verl_digen.algorithms.objectives.ratio import behaviour_log_ratio, ratio_of, truncated_ratio, weighted_reinforce
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.require import In


@dataclass(frozen=True)
class CispoConfig(ClampedConfig):
    low: Annotated[float, In("(0, 1]")] = 0.1
    """Weights are at least 1 - low. 0.1 (ROLL)."""
    high: Annotated[float, In("(0, inf)")] = 0.1
    """Weights are at most 1 + high. 0.1 (ROLL)."""
    mask: bool = False
    """Drop the gradient of rows that PPO would clip at the same bounds."""

    @property
    def clip_widths(self) -> Mapping[str, float]:
        return {"low": self.low, "high": self.high} if self.mask else {}


@register_objective(
    "cispo", config=CispoConfig, columns=("log_prob", BEHAVIOUR, "advantage"), homogeneous=True, off_policy=True
)
def clipped_weights(rows: LossInputs, config: CispoConfig) -> LossOutput:
    """mean[-sg[m clamp(r, 1 - low, 1 + high)] A log_prob], r = exp(log_prob - behaviour_log_prob). m is 1; with `mask`
    it is 0 where A > 0 and r > 1 + high, or A < 0 and r < 1 - low: the rows that PPO's clip leaves without gradient."""
    low, high = 1 - config.low, 1 + config.high
    weight, metrics = truncated_ratio(rows, low, high)
    if config.mask:
        ratio, advantage = ratio_of(behaviour_log_ratio(rows)), rows["advantage"]
        is_clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        weight = torch.where(is_clipped, 0.0, weight)
    return weighted_reinforce(rows, config, weight, metrics)
