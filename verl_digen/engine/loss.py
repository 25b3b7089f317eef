# SPDX-License-Identifier: Apache-2.0
"""Evaluated rows -> loss: the objective's terms, and the KL to the reference if `digen.kl.coef` > 0.

For path points `behaviour_log_prob` is always recorded at generation, and `DigenConfig.denominator` decides what
`old_log_prob` is:

| value | one optimizer step takes the batch | several do (mini-batches, epochs) |
| --- | --- | --- |
| first_pass | this forward's own, detached: the ratio is exactly 1, and nothing is computed twice | as recompute |
| recompute | a forward of the same tile before its own | a forward before the first step |
| rollout | recorded at generation | recorded at generation |
| unused | the loss does not read it | the same |

Invariant: losses of tiles add up to the logical batch's, because every mean divides by its `num_rows`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_digen.algorithms.kl import kl_inputs, kl_loss
from verl_digen.algorithms.objectives import find_objective, policy_loss
from verl_digen.algorithms.objectives.objective import BEHAVIOUR, OLD, policy_output
from verl_digen.algorithms.rows import LossInputs, Metric
from verl_digen.algorithms.sde import noise_rate
from verl_digen.config import DigenConfig
from verl_digen.engine.policies import Evaluated, Outputs, PolicyForward
from verl_digen.hardware.transfers import to_device
from verl_digen.types import TrainingRows, Transitions


@dataclass(frozen=True)
class LossTerms:
    """Share of some rows in the logical batch's loss, [] fp32 each."""

    scaled: Tensor
    """The objective's, which is divided by the advantage scale where that is known late."""
    fixed: Tensor | None
    """The KL, which does not depend on advantages; None without one."""
    metrics: Mapping[str, Metric]

    @property
    def total(self) -> Tensor:
        return self.scaled if self.fixed is None else self.scaled + self.fixed

    def detach(self) -> "LossTerms":
        """Copy without the autograd graph."""
        return LossTerms(self.scaled.detach(), None if self.fixed is None else self.fixed.detach(), self.metrics)

    def divide(self, divisor: float) -> "LossTerms":
        """The terms as if advantages had been divided by `divisor`."""
        scaled = self.scaled / divisor
        return replace(self, scaled=scaled, metrics={**self.metrics, "policy_loss": Metric(scaled)})


class DiffusionLoss:
    """The loss of the engine. ValueError if it does not fit `digen.loss.old_log_probs`."""

    def __init__(self, digen: DigenConfig):
        self.objective, self.config = find_objective(digen.loss_name), digen.loss_settings
        self.denominator = digen.denominator
        self.joint = self.objective.joint
        self.kl = digen.kl if digen.kl.coef > 0 else None
        own = kl_inputs(self.kl.kind) if self.kl is not None else ()
        self._inputs = {*self.objective.inputs_for(self.config), *own}

    @property
    def wanted(self) -> dict[str, list[str]]:
        """Outputs of other policies that a term or the joint column reads: policy -> their names."""
        found: dict[str, list[str]] = {}
        for name in sorted({*self._inputs, *self.objective.joint_latents}):
            if read := policy_output(name):
                found.setdefault(read[0], []).append(read[1])
        if "old" in found and self.objective.points == "path":
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
        joint: Tensor | None = None,
        clamps: bool = True,
    ) -> LossTerms:
        """The share of these rows in the logical batch's loss.

        Args:
            current: the rows under the weights that train, differentiable.
            others: the `wanted` outputs of other policies; without `old`, `current`'s, detached, take its place.
            rows: on the device of `current`, except for sigmas, which may stay on the host.
            old_log_probs: [N] fp32; None takes `old`'s.
            num_rows: unmasked rows of the logical batch, over all ranks.
            joint: [N] fp32, the objective's joint column, if it has one.
            clamps: False for advantages that are divided by their scale later.
        """
        device = current.velocity.device
        shared: dict[str, Tensor] = {"mask": rows.mask, "num_rows": torch.full((), num_rows, device=device)}
        inputs = shared | self._given(self._inputs, current, others, rows, old_log_probs)
        if self.joint is not None and joint is not None:
            inputs[self.joint.column] = joint
        policy = policy_loss(self.objective.name, inputs, self.config if clamps else self.config.unclamped())
        scaled, fixed, metrics = policy.loss, None, {**policy.metrics}
        if self.kl is not None:
            kl = kl_loss(self.kl.kind, inputs)
            fixed = self.kl.coef * kl.loss
            metrics |= kl.metrics
        metrics["policy_loss"] = Metric(scaled.detach())
        if isinstance(rows.point, Transitions):
            recorded = rows.point.log_probs
            metrics |= rollout_gap(shared | {"log_prob": current.log_prob.detach(), "recorded": recorded})
        return LossTerms(scaled, fixed, metrics)

    def joint_scalars(self, current: Evaluated, others: Mapping[str, Outputs], rows: TrainingRows) -> Tensor:
        """The number of each row that the joint column is made of, [N] fp32, without gradient."""
        assert self.joint is not None
        names = {*self.joint.columns, *self.joint.latents}
        inputs = self._given(names, current, others, rows, None) | {"mask": torch.ones_like(rows.mask)}
        checked = LossInputs.check(
            f"joint column {self.joint.column}", inputs, columns=self.joint.columns, latents=self.joint.latents
        )
        return self.joint.scalar(checked).detach()

    def _given(
        self,
        names: set[str],
        current: Evaluated,
        others: Mapping[str, Outputs],
        rows: TrainingRows,
        old_log_probs: Tensor | None,
    ) -> dict[str, Tensor]:
        """The inputs among `names` that these rows have."""
        tensors, device = current.tensors(), current.velocity.device
        old = others["old"] if "old" in others else {name: value.detach() for name, value in tensors.items()}
        there: dict[str, Tensor | None] = {
            **tensors,
            "advantage": rows.advantages,
            "reward": rows.rewards,
            "sigma": to_device(rows.sigmas, device),
        }
        if isinstance(rows.point, Transitions):
            there |= {
                OLD: old.get("log_prob") if old_log_probs is None else old_log_probs,
                BEHAVIOUR: rows.point.log_probs,
                "sigma_next": to_device(rows.point.next_sigmas, device),
                "sigma_max": to_device(rows.point.sigma_max, device),
                "noise_rate": _noise_rate(rows, rows.point, current) if "noise_rate" in names else None,
                "latents": rows.latents,
                "next_latents": rows.point.next_latents,
            }
        else:
            there |= {"clean": rows.point.clean, "noise": rows.point.noise, "noisy": rows.latents}
        for name in names:
            if read := policy_output(name):
                policy, output = read
                there[name] = (old if policy == "old" else others[policy])[output]
        return {name: value for name, value in there.items() if name in names and value is not None}


def _noise_rate(rows: TrainingRows, point: Transitions, current: Evaluated) -> Tensor:
    """[N] fp32 on the device, see `sde.noise_rate`."""
    assert current.step is not None
    std = current.step.std.detach()
    length = to_device(rows.sigmas, std.device), to_device(point.next_sigmas, std.device)
    return noise_rate(rows.sampling.law, std, *length)


def rollout_gap(inputs: Mapping[str, Tensor]) -> dict[str, Metric]:
    """Gap between the engine's log-probs and those `recorded` at generation; 0 if both compute the same."""
    rows = LossInputs.check("rollout gap", inputs, columns=("log_prob", "recorded"))
    gap = rows["log_prob"] - rows["recorded"]
    return {
        "rollout_log_prob_gap_mean": Metric(rows.mean(gap.abs()), "first"),
        "rollout_log_prob_gap_max": Metric(rows.max(gap.abs()), "first_max"),
        "rollout_ratio": Metric(rows.mean(gap.exp()), "first"),
        "rollout_ratio_above_fraction": Metric(rows.mean((gap > 0).float()), "first"),
        "rollout_ratio_below_fraction": Metric(rows.mean((gap < 0).float()), "first"),
        "rollout_ratio_deviation_max": Metric(rows.max(gap.expm1().abs()), "first_max"),
    }


def tile_loss(
    forward: PolicyForward,
    loss: DiffusionLoss,
    rows: TrainingRows,
    others: Mapping[str, Outputs],
    num_rows: float,
    *,
    joint: Tensor | None = None,
    clamps: bool = True,
) -> tuple[Evaluated, LossTerms]:
    """(rows under the weights that train, their share of the loss), differentiable; arguments as in `DiffusionLoss`."""
    old, others = _with_old(forward, loss, rows, others)
    current = forward(rows)
    return current, loss(current, others, rows, old, num_rows, joint=joint, clamps=clamps)


def _with_old(
    forward: PolicyForward, loss: DiffusionLoss, rows: TrainingRows, others: Mapping[str, Outputs]
) -> tuple[Tensor | None, Mapping[str, Outputs]]:
    """(old log-probs [N], outputs of all policies), see `loss`; without both, the forward's own take their place."""
    denominator, point = loss.denominator, rows.point
    if "old" in others or denominator == "unused" or not isinstance(point, Transitions):
        return None, others
    if denominator == "rollout":
        return point.log_probs, others
    if point.old_log_probs is not None:
        return point.old_log_probs, others
    if denominator == "recompute":  # weights do not change until the batch is complete
        with torch.no_grad():
            before = forward(rows).outputs(("log_prob", *loss.wanted.get("old", ())))
        return None, {**others, "old": before}
    return None, others
