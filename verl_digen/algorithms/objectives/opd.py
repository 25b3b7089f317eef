# SPDX-License-Identifier: Apache-2.0
"""`opd`: on-policy distillation. On trajectories of its own the student learns the steps of a frozen teacher.
`opd_forward`: the same at its finished pictures, noised again.

| `kind` | distance of a row from its teacher T |
| --- | --- |
| `kl` | mean[(mu - mu_T)^2] / (2 s^2), s the noise rate of the step (`noise_rate`) |
| `velocity` | mean[(v - v_T)^2] |

The distance itself is differentiated, through mu or v of the student: this is regression on the teacher's step, not a
policy gradient, and needs no reward. `task_coef` adds flow_grpo's loss, which has advantages.

Sources: `distill_kl`, `distill_fm_mse` of verl-omni; DiffusionOPD, arXiv 2605.15055. Flow-OPD (arXiv 2605.08063) takes
-distance as the advantage and does not detach it: its gradient is nearly this one, and vanishes beyond its clip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl_digen.algorithms.metric import Metric
from verl_digen.algorithms.objectives.config import ClipConfig, LossConfig
from verl_digen.algorithms.objectives.flow_grpo import clipped_ratio
from verl_digen.algorithms.objectives.objective import OLD
from verl_digen.algorithms.objectives.registry import register_objective
from verl_digen.algorithms.objectives.teacher import Teacher, read_teachers
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.algorithms.sde import gaussian_kl, latent_mean
from verl_digen.require import require, require_one_of

KINDS = ("kl", "velocity")
VELOCITIES = ("velocity", "teacher_velocity")


def check_coef(value: float) -> None:
    """Require a usable `digen.loss.distill_coef`; ValueError."""
    require(0 < value < math.inf, "digen.loss.distill_coef must be > 0 and finite", value, "1 is usual")


@dataclass(frozen=True)
class OpdConfig(ClipConfig):
    """Settings of `opd`. Clips are those of the task's loss."""

    teachers: dict[str, Any] = field(default_factory=dict)
    """Teachers by names of your own, see `objectives.teacher`."""
    kind: str = "kl"
    """Distance from the teacher: kl of the steps' Gaussians, or velocity."""
    distill_coef: float = 1.0
    """Weight of the distance."""
    task_coef: float = 0.0
    """Weight of flow_grpo's loss on the rewards. 0: rewards are logged, and nothing is trained on them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.taught_by  # raises
        require_one_of("digen.loss.kind", self.kind, KINDS)
        check_coef(self.distill_coef)
        require(
            0 <= self.task_coef < math.inf,
            "digen.loss.task_coef must be >= 0 and finite",
            self.task_coef,
            "0 distils alone",
        )

    @property
    def taught_by(self) -> Mapping[str, Teacher]:
        return read_teachers(self.teachers)

    @property
    def advantage_bound(self) -> float:
        return self.advantage_clip if self.task_coef > 0 else math.inf

    @property
    def clip_widths(self) -> Mapping[str, float]:
        return super().clip_widths if self.task_coef > 0 else {}

    @property
    def more_columns(self) -> tuple[str, ...]:
        task = ("log_prob", OLD, "advantage") if self.task_coef > 0 else ()
        return (*task, *(("noise_rate",) if self.kind == "kl" else ()))

    @property
    def more_latents(self) -> tuple[str, ...]:
        return ("mean", "teacher_mean") if self.kind == "kl" else ()


@register_objective(
    "opd",
    config=OpdConfig,
    latents=VELOCITIES,
    homogeneous=True,  # but for the distance, which is no part of what the advantage scale divides
)
def on_policy_distillation(rows: LossInputs, config: OpdConfig) -> LossOutput:
    """distill_coef D + task_coef flow_grpo, D the distance of `kind`."""
    between_velocities = velocity_distance(rows)
    distance = between_velocities
    metrics = {"teacher_velocity_distance": rows.mean_metric(between_velocities)}
    if config.kind == "kl":
        distance = gaussian_kl(rows["mean"], rows["teacher_mean"], rows["noise_rate"])
        metrics["teacher_kl"] = rows.mean_metric(distance)
    fixed = config.distill_coef * rows.mean(distance)
    metrics["distill_loss"] = Metric(fixed.detach())
    if config.task_coef == 0:
        return LossOutput(torch.zeros_like(fixed).detach(), metrics, fixed)
    task = clipped_ratio(rows, config)
    return LossOutput(config.task_coef * task.loss, {**metrics, **task.metrics}, fixed)


@dataclass(frozen=True)
class OpdForwardConfig(LossConfig):
    """Settings of `opd_forward`, whose distance is that of velocities."""

    teachers: dict[str, Any] = field(default_factory=dict)
    """Teachers, see `OpdConfig`."""
    distill_coef: float = 1.0
    """Weight of the distance."""

    def __post_init__(self) -> None:
        _ = self.taught_by  # raises
        check_coef(self.distill_coef)

    @property
    def taught_by(self) -> Mapping[str, Teacher]:
        return read_teachers(self.teachers)


@register_objective(
    "opd_forward", config=OpdForwardConfig, points="forward", latents=VELOCITIES, homogeneous=True, off_policy=True
)
def forward_distillation(rows: LossInputs, config: OpdForwardConfig) -> LossOutput:
    """distill_coef mean[(v - v_T)^2] at noised pictures of the student."""
    distance = velocity_distance(rows)
    fixed = config.distill_coef * rows.mean(distance)
    metrics = {"teacher_velocity_distance": rows.mean_metric(distance), "distill_loss": Metric(fixed.detach())}
    return LossOutput(torch.zeros_like(fixed).detach(), metrics, fixed)


def velocity_distance(rows: LossInputs) -> Tensor:
    """[N] mean[(v - v_T)^2]."""
    return latent_mean((rows["velocity"] - rows["teacher_velocity"]).square())
