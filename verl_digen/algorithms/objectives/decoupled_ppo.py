# SPDX-License-Identifier: Apache-2.0
"""`decoupled_ppo`: PPO against the policy before the update, on samples of an earlier one.

Source: Hilton et al., arXiv 2110.00641, as in AReaL, arXiv 2505.24298.
"""

from dataclasses import dataclass
from typing import Annotated

from verl_digen.algorithms.objectives.objective import BEHAVIOUR, OLD, ClipConfig, register_objective
from verl_digen.algorithms.objectives.ratio import clipped, ratio_of
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.require import In


@dataclass(frozen=True)
class DecoupledPpoConfig(ClipConfig):
    cap: Annotated[float, In("[1, inf)"), "a sample of the weights before the update has 1"] = 1.2
    """The largest weight of a row. AReaL, for tokens, drops weights above 5."""


@register_objective(
    "decoupled_ppo",
    config=DecoupledPpoConfig,
    columns=("log_prob", OLD, BEHAVIOUR, "advantage"),
    homogeneous=True,
    off_policy=True,
)
def decoupled_clip(rows: LossInputs, config: DecoupledPpoConfig) -> LossOutput:
    """mean[sg[min(exp(old_log_prob - behaviour_log_prob), cap)] max(-A q, -A clamp(q, 1 - c, 1 + c'))], q =
    exp(log_prob - old_log_prob)."""
    behaviour_ratio = ratio_of(rows[OLD] - rows[BEHAVIOUR]).detach()
    weight = behaviour_ratio.clamp(max=config.cap)
    per_row, metrics = clipped(rows, config, rows["log_prob"] - rows[OLD])
    metrics |= {"behaviour_weight": rows.mean_metric(weight), "behaviour_ratio_max": rows.max_metric(behaviour_ratio)}
    return LossOutput(rows.mean(weight * per_row), metrics)
