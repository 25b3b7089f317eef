# SPDX-License-Identifier: Apache-2.0
"""`kimi`: REINFORCE with a squared log-ratio. Source: Kimi k1.5, arXiv 2501.12599; the group's mean reward is its
baseline, which is in A."""

from dataclasses import dataclass
from typing import Annotated

from verl_digen.algorithms.objectives.objective import BEHAVIOUR, ClampedConfig, register_objective
from verl_digen.algorithms.objectives.ratio import behaviour_log_ratio, clamped_advantage
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.require import In


@dataclass(frozen=True)
class KimiConfig(ClampedConfig):
    tau: Annotated[float, In("[0, inf)")] = 0.1
    """Weight of the squared log-ratio. 0.1 (ROLL)."""


@register_objective("kimi", config=KimiConfig, columns=("log_prob", BEHAVIOUR, "advantage"), off_policy=True)
def squared_log_ratio(rows: LossInputs, config: KimiConfig) -> LossOutput:
    """mean[-A log_prob + tau / 2 (log_prob - behaviour_log_prob)^2]; not homogeneous in A."""
    half_square = 0.5 * behaviour_log_ratio(rows).square()
    per_row = -clamped_advantage(rows, config) * rows["log_prob"] + config.tau * half_square
    return LossOutput(rows.mean(per_row), {"approx_kl": rows.mean_metric(half_square)})
