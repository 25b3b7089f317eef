# SPDX-License-Identifier: Apache-2.0
"""Evaluated rows -> loss: the policy loss by name, the KL term, and the old log-probs of the ratio.

The inputs of policy losses are listed in `verl_digen.algorithms.losses`. `behaviour_log_prob` is always recorded at
generation. `DigenConfig.denominator` decides what `old_log_prob` is:

| value | one optimizer step takes the batch | several do (mini-batches, epochs) |
| --- | --- | --- |
| first_pass | this forward's own, detached: the ratio is exactly 1, and nothing is computed twice | as recompute |
| recompute | a forward of the same tile before its own | a forward before the first step |
| rollout | recorded at generation | recorded at generation |
| unused | the loss does not read it | the same |

Invariant: losses of tiles add up to that of the logical batch, because every mean divides by its `num_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_digen.algorithms.kl import kl_loss
from verl_digen.algorithms.losses import loss_names, policy_loss, reads_trajectories
from verl_digen.algorithms.losses.registry import BEHAVIOUR, OLD, TRAJECTORY
from verl_digen.algorithms.rows import LossInputs
from verl_digen.algorithms.sde import SdeStep
from verl_digen.config import DigenConfig
from verl_digen.require import require_one_of
from verl_digen.types import TrainingRows


@dataclass(frozen=True)
class Reference:
    """Outputs of the reference policy on N rows; the KL kind reads one of the two."""

    mean: Tensor
    """[N, ...] fp32 mean of x'."""
    velocity: Tensor
    """[N, ...] fp32."""

    def to(self, device: torch.device | str) -> Reference:
        """Copy on `device`."""
        return Reference(self.mean.to(device), self.velocity.to(device))


@dataclass(frozen=True)
class LossTerms:
    """Share of some rows in the logical batch's loss, [] fp32 each."""

    policy: Tensor
    kl: Tensor | None
    """Multiplied by `digen.kl.coef`; None without a reference."""
    metrics: dict[str, Tensor]

    @property
    def total(self) -> Tensor:
        return self.policy if self.kl is None else self.policy + self.kl

    def detach(self) -> LossTerms:
        """Copy without the autograd graph."""
        return LossTerms(self.policy.detach(), None if self.kl is None else self.kl.detach(), self.metrics)

    def divide_policy(self, divisor: float) -> LossTerms:
        """The terms as if advantages had been divided by `divisor`."""
        policy = self.policy / divisor
        return replace(self, policy=policy, metrics=self.metrics | {"policy_loss": policy})


class DiffusionLoss:
    """The loss function verl's training worker hands to the engine.

    Raises:
        ValueError: `digen.loss_name` is unknown, or does not fit `digen.old_log_probs`.
    """

    def __init__(self, digen: DigenConfig):
        require_one_of("digen.loss_name", digen.loss_name, loss_names())
        self.digen = digen
        self.denominator = digen.denominator
        self.reads_trajectories = reads_trajectories(digen.loss_name)
        """True if the loss of a row depends on the other rows of its trajectory."""
        self.unclamped = replace(digen.loss, advantage_clip=math.inf)

    def __call__(
        self,
        step: SdeStep,
        velocity: Tensor,
        reference: Reference | None,
        rows: TrainingRows,
        old_log_probs: Tensor | None,
        num_rows: float,
        *,
        trajectory_log_ratios: Tensor | None = None,
        clamps: bool = True,
    ) -> LossTerms:
        """The share of these rows in the logical batch's loss.

        Args:
            step, velocity: the rows evaluated with the current weights, differentiable.
            reference: the same rows under the reference, if the KL term is on.
            rows: on the device of `velocity`, except for sigmas, which may stay on the host.
            old_log_probs: [N] fp32; None takes this forward's own, detached.
            num_rows: unmasked rows of the logical batch, over all ranks.
            trajectory_log_ratios: [N] fp32, if the loss `reads_trajectories`.
            clamps: False does not clamp advantages, for those that are divided by their scale later.
        """
        device = velocity.device
        shared: dict[str, Tensor] = {"mask": rows.mask, "num_rows": torch.tensor(num_rows, device=device)}
        old = step.log_prob.detach() if old_log_probs is None else old_log_probs
        moments = shared | {
            "mean": step.mean,
            "velocity": velocity,
            "std": step.std,
            "dt": (rows.next_sigmas - rows.sigmas).to(device),
        }
        inputs = moments | {
            "log_prob": step.log_prob,
            OLD: old,
            BEHAVIOUR: rows.log_probs,
            "advantage": rows.advantages,
            "latents": rows.latents,
            "next_latents": rows.next_latents,
        }
        if rows.rewards is not None:
            inputs["reward"] = rows.rewards
        if trajectory_log_ratios is not None:
            inputs[TRAJECTORY] = trajectory_log_ratios
        config = self.digen.loss if clamps else self.unclamped
        policy = policy_loss(self.digen.loss_name, inputs, config)
        metrics = {"policy_loss": policy.loss.detach(), **policy.metrics}
        weighed_kl = None
        if reference is not None:
            kl = kl_loss(self.digen.kl.kind, moments | {"ref_mean": reference.mean, "ref_velocity": reference.velocity})
            weighed_kl = self.digen.kl.coef * kl.loss
            metrics |= kl.metrics
        metrics |= rollout_gap(shared | {"log_prob": step.log_prob.detach(), "recorded": rows.log_probs})
        return LossTerms(policy.loss, weighed_kl, metrics)


def rollout_gap(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gap between the engine's log-probs and those `recorded` at generation; 0 if both compute the same."""
    rows = LossInputs.check("rollout gap", inputs, columns=("log_prob", "recorded"))
    gap = rows["log_prob"] - rows["recorded"]
    return {
        "rollout_log_prob_gap_mean": rows.mean(gap.abs()),
        "rollout_log_prob_gap_max": rows.max(gap.abs()),
        "rollout_ratio": rows.mean(gap.exp()),
        "rollout_ratio_deviation_max": rows.max(gap.expm1().abs()),
    }


def combine_metrics(metrics: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Combine metrics of tiles: `_max` and `_min` by max and min, others (shares of a mean) by sum."""
    gathered: dict[str, list[Tensor]] = {}
    for one in metrics:
        for name, value in one.items():
            gathered.setdefault(name, []).append(value)
    return {name: _combine(name, torch.stack(values)) for name, values in gathered.items()}


def is_share(name: str) -> bool:
    """True if a metric is a share of the logical batch's mean, not a largest or smallest value."""
    return not name.endswith(("_max", "_min"))


def _combine(name: str, values: Tensor) -> Tensor:
    if name.endswith("_max"):
        return values.amax()
    if name.endswith("_min"):
        return values.amin()
    return values.sum()
