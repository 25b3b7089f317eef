# SPDX-License-Identifier: Apache-2.0
"""FlowGRPO's and DanceGRPO's loss: PPO's clip.

Sources: Flow-GRPO, arXiv 2505.05470; DanceGRPO, arXiv 2505.07818.
"""

from verl_digen.algorithms.objectives.objective import OLD, ClipConfig, register_objective
from verl_digen.algorithms.objectives.ratio import clipped
from verl_digen.algorithms.rows import LossInputs, LossOutput


@register_objective(
    "flow_grpo", "dance_grpo", config=ClipConfig, columns=("log_prob", OLD, "advantage"), homogeneous=True
)
def clipped_ratio(rows: LossInputs, config: ClipConfig) -> LossOutput:
    """mean[max(-A r, -A clamp(r, 1 - c, 1 + c'))], r = exp(log_prob - old_log_prob)."""
    per_row, metrics = clipped(rows, config, rows["log_prob"] - rows[OLD])
    return LossOutput(rows.mean(per_row), metrics)
