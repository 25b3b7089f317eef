# SPDX-License-Identifier: Apache-2.0
"""`gspo`: PPO's clip of the whole trajectory's ratio. Source: arXiv 2507.18071."""

from torch import Tensor

from verl_digen.algorithms.objectives.matching import sums_together
from verl_digen.algorithms.objectives.objective import BEHAVIOUR, ClipConfig, Joint, JointRows, register_objective
from verl_digen.algorithms.objectives.ratio import behaviour_log_ratio, clipped
from verl_digen.algorithms.rows import LossInputs, LossOutput

TRAJECTORY = "trajectory_log_ratio"
"""Column: mean of log_prob - behaviour_log_prob, under the current weights, over the trained steps of the row's
trajectory."""


def trajectory_log_ratios(log_ratio: Tensor, trajectories: Tensor) -> Tensor:
    """[N] log-ratios and [N] int ids -> [N]: each row has the mean over the rows of its trajectory.

    Example:
        trajectory_log_ratios(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([7, 7, 2]))  # 2, 2, 5
    """
    sums, counts = sums_together(log_ratio, trajectories)
    return sums / counts


def _means(rows: JointRows, config: ClipConfig) -> Tensor:
    return trajectory_log_ratios(rows.scalars, rows.samples)


@register_objective(
    "gspo",
    config=ClipConfig,
    columns=("log_prob", TRAJECTORY, "advantage"),
    homogeneous=True,
    off_policy=True,
    joint=Joint(TRAJECTORY, ("log_prob", BEHAVIOUR), scalar=behaviour_log_ratio, combine=_means),
)
def trajectory_clip(rows: LossInputs, config: ClipConfig) -> LossOutput:
    """mean[max(-A s, -A clamp(s, 1 - c, 1 + c'))], s = exp(`trajectory_log_ratio`).

    s has no gradient, because a trajectory's rows may lie in several tiles. It depends on the log-probs of all K rows
    of a trajectory, with weight 1 / K each, and K rows have the loss of s. So the gradient is that of K rows with s
    exp(log_prob - sg[log_prob]) in place of s (GSPO-token, with one advantage for all rows of a trajectory).
    """
    log_prob = rows["log_prob"]
    per_row, metrics = clipped(rows, config, rows[TRAJECTORY].detach() + (log_prob - log_prob.detach()))
    return LossOutput(rows.mean(per_row), metrics)
