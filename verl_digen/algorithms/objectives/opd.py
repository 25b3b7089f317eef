# SPDX-License-Identifier: Apache-2.0
"""`opd`: on-policy distillation. On trajectories of its own the student learns the steps of a frozen teacher, a LoRA
adapter of the same base.

A row's distance from the teacher T is of kind `kl`, mean[(mu - mu_T)^2] / (2 s^2), s the noise rate of the step, or
`velocity`, mean[(v - v_T)^2]. It is differentiated itself, through mu or v of the student: this is regression on the
teacher's step, not a policy gradient, and needs no reward.

Sources: `distill_kl`, `distill_fm_mse` of verl-omni; DiffusionOPD, arXiv 2605.15055. Flow-OPD (arXiv 2605.08063) takes
-distance as the advantage and does not detach it: its gradient is nearly this one, and vanishes beyond its clip.
"""

from dataclasses import dataclass
from typing import Annotated

from verl_digen.algorithms.objectives.objective import LossConfig, register_objective
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.algorithms.sde import gaussian_kl, latent_mean
from verl_digen.require import OneOf

KINDS = ("kl", "velocity")


@dataclass(frozen=True)
class OpdConfig(LossConfig):
    teacher: str | None = None
    """Folder of the teacher on every trainer node: a LoRA adapter in peft's format for the run's checkpoint, with the
    rank and layers of the adapter that trains."""
    kind: Annotated[str, OneOf(KINDS)] = "kl"
    """Distance from the teacher: kl of the steps' Gaussians, or velocity."""

    @property
    def taught_by(self) -> str | None:
        return self.teacher

    @property
    def more_columns(self) -> tuple[str, ...]:
        return ("noise_rate",) if self.kind == "kl" else ()

    @property
    def more_latents(self) -> tuple[str, ...]:
        return ("mean", "teacher_mean") if self.kind == "kl" else ()


@register_objective(
    "opd",
    config=OpdConfig,
    latents=("velocity", "teacher_velocity"),
    homogeneous=True,  # it has no advantages to wait for
)
def on_policy_distillation(rows: LossInputs, config: OpdConfig) -> LossOutput:
    """mean D, D the distance of `kind`."""
    distance = latent_mean((rows["velocity"] - rows["teacher_velocity"]).square())
    metrics = {"teacher_velocity_distance": rows.mean_metric(distance)}
    if config.kind == "kl":
        distance = gaussian_kl(rows["mean"], rows["teacher_mean"], rows["noise_rate"])
        metrics["teacher_kl"] = rows.mean_metric(distance)
    return LossOutput(rows.mean(distance), metrics)
