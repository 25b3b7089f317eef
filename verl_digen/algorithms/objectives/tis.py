# SPDX-License-Identifier: Apache-2.0
"""`tis`: truncated importance sampling. Source: Ionides 2008, as in ROLL."""

import math
from dataclasses import dataclass

from verl_digen.algorithms.objectives.objective import BEHAVIOUR, ClampedConfig, register_objective
from verl_digen.algorithms.objectives.ratio import truncated_ratio, weighted_reinforce
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.require import require


@dataclass(frozen=True)
class TisConfig(ClampedConfig):
    low: float = 0.0
    """The smallest weight of a row. 0 (ROLL)."""
    high: float = 1.0
    """The largest weight of a row. 1 (ROLL)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.low <= self.high and 0 < self.high < math.inf,
            "digen.loss.low and digen.loss.high must be 0 <= low <= high, with a finite high > 0",
            (self.low, self.high),
            "0 and 1 are usual",
        )


@register_objective(
    "tis", config=TisConfig, columns=("log_prob", BEHAVIOUR, "advantage"), homogeneous=True, off_policy=True
)
def truncated_importance_sampling(rows: LossInputs, config: TisConfig) -> LossOutput:
    """mean[-sg[clamp(r, low, high)] A log_prob], r = exp(log_prob - behaviour_log_prob)."""
    weight, metrics = truncated_ratio(rows, config.low, config.high)
    return weighted_reinforce(rows, config, weight, metrics)
