# SPDX-License-Identifier: Apache-2.0
"""Evaluated rows -> loss: the policy loss by name and the KL term, with the inputs that they declare.

The inputs are listed in `verl_digen.algorithms.objectives`. `behaviour_log_prob` is always recorded at generation.
`DigenConfig.denominator` decides what `old_log_prob` is:

| value | one optimizer step takes the batch | several do (mini-batches, epochs) |
| --- | --- | --- |
| first_pass | this forward's own, detached: the ratio is exactly 1, and nothing is computed twice | as recompute |
| recompute | a forward of the same tile before its own | a forward before the first step |
| rollout | recorded at generation | recorded at generation |
| unused | the loss does not read it | the same |

Invariant: losses of tiles add up to that of the logical batch, because every mean divides by its `num_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_digen.algorithms.kl import kl_inputs, kl_loss
from verl_digen.algorithms.metric import Metric
from verl_digen.algorithms.objectives import find_loss, loss_names, policy_loss
from verl_digen.algorithms.objectives.registry import BEHAVIOUR, OLD, POLICY_LATENTS, TRAJECTORY
from verl_digen.algorithms.rows import LossInputs
from verl_digen.config import DigenConfig
from verl_digen.engine.policies import Evaluated, Outputs
from verl_digen.require import require_one_of
from verl_digen.types import TrainingRows


@dataclass(frozen=True)
class LossTerms:
    """Share of some rows in the logical batch's loss, [] fp32 each."""

    policy: Tensor
    kl: Tensor | None
    """Multiplied by `digen.kl.coef`; None without a KL term."""
    metrics: Mapping[str, Metric]

    @property
    def total(self) -> Tensor:
        return self.policy if self.kl is None else self.policy + self.kl

    def detach(self) -> LossTerms:
        """Copy without the autograd graph."""
        return LossTerms(self.policy.detach(), None if self.kl is None else self.kl.detach(), self.metrics)

    def divide_policy(self, divisor: float) -> LossTerms:
        """The terms as if advantages had been divided by `divisor`."""
        policy = self.policy / divisor
        return replace(self, policy=policy, metrics={**self.metrics, "policy_loss": Metric(policy)})


class DiffusionLoss:
    """The loss of the engine: a policy loss, and the KL term if `digen.kl.coef` > 0.

    Raises:
        ValueError: `digen.loss.name` is unknown, its settings are wrong, or it does not fit `digen.loss.old_log_probs`.
    """

    def __init__(self, digen: DigenConfig):
        require_one_of("digen.loss.name", digen.loss_name, loss_names())
        self.loss, self.config = find_loss(digen.loss_name), digen.loss_settings
        self.unclamped = self.config.unclamped()
        self.denominator = digen.denominator
        self.kl = digen.kl if digen.kl.coef > 0 else None
        self._inputs = {*self.loss.inputs, *(kl_inputs(digen.kl.kind) if self.kl else ())}

    @property
    def reads_trajectories(self) -> bool:
        """True if the loss of a row depends on the other rows of its trajectory."""
        return self.loss.reads_trajectories

    @property
    def wanted(self) -> dict[str, list[str]]:
        """Outputs of other policies that a term reads: policy -> their names."""
        found: dict[str, list[str]] = {}
        for name in sorted(self._inputs & POLICY_LATENTS.keys()):
            policy, output = POLICY_LATENTS[name]
            found.setdefault(policy, []).append(output)
        if "old" in found:
            found["old"].append("log_prob")
        return found

    def __call__(
        self,
        current: Evaluated,
        others: Mapping[str, Outputs],
        rows: TrainingRows,
        old_log_probs: Tensor | None,
        num_rows: float,
        *,
        trajectory_log_ratios: Tensor | None = None,
        clamps: bool = True,
    ) -> LossTerms:
        """The share of these rows in the logical batch's loss.

        Args:
            current: the rows under the weights that train, differentiable.
            others: the `wanted` outputs of other policies; without `old`, those of `current`, detached, take its place.
            rows: on the device of `current`, except for sigmas, which may stay on the host.
            old_log_probs: [N] fp32; None takes those of `old`.
            num_rows: unmasked rows of the logical batch, over all ranks.
            trajectory_log_ratios: [N] fp32, if the loss `reads_trajectories`.
            clamps: False does not clamp advantages, for those that are divided by their scale later.
        """
        device = current.velocity.device
        shared: dict[str, Tensor] = {"mask": rows.mask, "num_rows": torch.tensor(num_rows, device=device)}
        inputs = shared | self._given(current, others, rows, old_log_probs, trajectory_log_ratios)
        policy = policy_loss(self.loss.name, inputs, self.config if clamps else self.unclamped)
        metrics = {"policy_loss": Metric(policy.loss.detach()), **policy.metrics}
        weighed_kl = None
        if self.kl is not None:
            kl = kl_loss(self.kl.kind, inputs)
            weighed_kl = self.kl.coef * kl.loss
            metrics |= kl.metrics
        metrics |= rollout_gap(shared | {"log_prob": current.log_prob.detach(), "recorded": rows.log_probs})
        return LossTerms(policy.loss, weighed_kl, metrics)

    def _given(
        self,
        current: Evaluated,
        others: Mapping[str, Outputs],
        rows: TrainingRows,
        old_log_probs: Tensor | None,
        trajectory_log_ratios: Tensor | None,
    ) -> dict[str, Tensor]:
        """The inputs that a term reads, by name."""
        device = current.velocity.device
        old = others["old"] if "old" in others else current.outputs(("log_prob", "mean", "velocity"))
        sources: dict[str, Callable[[], Tensor | None]] = {
            "log_prob": lambda: current.log_prob,
            OLD: lambda: old["log_prob"] if old_log_probs is None else old_log_probs,
            BEHAVIOUR: lambda: rows.log_probs,
            TRAJECTORY: lambda: trajectory_log_ratios,
            "advantage": lambda: rows.advantages,
            "reward": lambda: rows.rewards,
            "std": lambda: current.std,
            "sigma": lambda: rows.sigmas.to(device),
            "sigma_next": lambda: rows.next_sigmas.to(device),
            "latents": lambda: rows.latents,
            "next_latents": lambda: rows.next_latents,
            "mean": lambda: current.mean,
            "velocity": lambda: current.velocity,
        }
        given = {name: sources[name]() for name in self._inputs - POLICY_LATENTS.keys()}
        for name in self._inputs & POLICY_LATENTS.keys():
            policy, output = POLICY_LATENTS[name]
            given[name] = (old if policy == "old" else others[policy])[output]
        return {name: value for name, value in given.items() if value is not None}


def rollout_gap(inputs: Mapping[str, Tensor]) -> dict[str, Metric]:
    """Gap between the engine's log-probs and those `recorded` at generation; 0 if both compute the same."""
    rows = LossInputs.check("rollout gap", inputs, columns=("log_prob", "recorded"))
    gap = rows["log_prob"] - rows["recorded"]
    return {
        "rollout_log_prob_gap_mean": Metric(rows.mean(gap.abs()), "first"),
        "rollout_log_prob_gap_max": Metric(rows.max(gap.abs()), "first_max"),
        "rollout_ratio": Metric(rows.mean(gap.exp()), "first"),
        "rollout_ratio_deviation_max": Metric(rows.max(gap.expm1().abs()), "first_max"),
    }
