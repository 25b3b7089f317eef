# SPDX-License-Identifier: Apache-2.0
"""`reinforce`: the plain policy gradient."""

from verl_digen.algorithms.objectives.objective import ClampedConfig, register_objective
from verl_digen.algorithms.objectives.ratio import clamped_advantage
from verl_digen.algorithms.rows import LossInputs, LossOutput


@register_objective(
    "reinforce", config=ClampedConfig, columns=("log_prob", "advantage"), homogeneous=True, off_policy=True
)
def reinforce(rows: LossInputs, config: ClampedConfig) -> LossOutput:
    """mean[-A log_prob], whichever policy generated the sample."""
    return LossOutput(rows.mean(-clamped_advantage(rows, config) * rows["log_prob"]), {})
