# SPDX-License-Identifier: Apache-2.0
"""`online_dpo` and `offline_dpo`: preference pairs. Needs final latents alone.

`online_dpo`: the best and the worst sample of a group; one whose rewards are all equal has no pair, and trains nothing.
`offline_dpo`: the two pictures of a prompt's row, which replicas encode, as a group of two samples: number 0 is the
chosen picture, of reward 1, number 1 the rejected one, of reward 0.

The loss is -logsigmoid(-beta / 2 m), m = (e - e_ref) of the preferred sample minus the other's, e the flow error under
a noise and a noise level that both share.

Source: Diffusion-DPO, arXiv 2311.12908, for flow matching as in flow_grpo's code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor
from torch.nn.functional import softplus

from verl_digen.algorithms.ema import Decay
from verl_digen.algorithms.objectives.matching import ERRORS, error_gain, flow_error, sums_together
from verl_digen.algorithms.objectives.objective import Joint, JointRows, LossConfig, best_and_worst, register_objective
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.require import In

MARGIN = "pair_margin"
"""Column: m of the row's pair."""


@dataclass(frozen=True)
class DpoConfig(LossConfig):
    beta: Annotated[float, In("(0, inf)"), "100 to 5000 is usual"] = 2000.0
    """Strength of the preference. 2000 is the default of verl-omni and Flow-Factory, published recipes have 100."""
    reference_every: Annotated[int | None, In("[1, inf]"), "flow_grpo suggests 40"] = None
    """Optimizer steps after which the reference becomes a copy of the policy, again and again; flow_grpo suggests 40.
    null: it stays as the run began."""

    @property
    def copies(self) -> Mapping[str, Decay]:
        return {} if self.reference_every is None else {"reference": Decay(0.0, 0.0, every=self.reference_every)}


@dataclass(frozen=True)
class OfflineDpoConfig(DpoConfig):
    beta: float = 5000.0
    """Strength of the preference. 5000 as in Diffusion-DPO's launch scripts; its paper has 2000 for SD1.5."""


def preferred_pair(rewards: Sequence[float]) -> Sequence[int]:
    """Positions of the best and the worst sample; none if all rewards are equal."""
    return best_and_worst(rewards, 2) if max(rewards) > min(rewards) else ()


def pair_margins(rows: JointRows, config: DpoConfig) -> Tensor:
    """[M] margin m of each row's pair: the sum over its rows of the sign of the advantage times e - e_ref. ValueError
    if a group's rows at one point are not two with advantages of opposite signs."""
    signs = rows.advantages.sign()
    balance, counts = sums_together(signs, rows.groups, rows.points)
    if not (balance.eq(0) & counts.eq(2)).all():
        raise ValueError(
            "a loss of preference pairs needs two rows of each group at a point, with advantages of opposite signs, "
            f"got {sorted({*counts.tolist()})} rows and signs that add up to {sorted({*balance.tolist()})}; give the "
            "best and the worst sample of each group"
        )
    return sums_together(signs * rows.scalars, rows.groups, rows.points)[0]


DECLARED = {
    "points": "forward",
    "columns": ("advantage", MARGIN),
    "latents": ("clean", "noise", "velocity"),
    "off_policy": True,
    "select": preferred_pair,
    "shares_noise": True,
    "joint": Joint(MARGIN, (), scalar=error_gain, combine=pair_margins, latents=ERRORS, needs_groups=True),
}


@register_objective("offline_dpo", config=OfflineDpoConfig, source="dataset", **DECLARED)
@register_objective("online_dpo", config=DpoConfig, **DECLARED)
def preference(rows: LossInputs, config: DpoConfig) -> LossOutput:
    """Mean over pairs of -logsigmoid(-beta / 2 m), whose gradient is beta / 2 sigmoid(beta / 2 m) (grad e_best - grad
    e_worst). A pair is two rows, so each has weight beta sigmoid(beta / 2 m), with the sign of its advantage."""
    half, error = 0.5 * config.beta * rows[MARGIN].detach(), flow_error(rows, "velocity")
    weight = config.beta * half.sigmoid() * rows["advantage"].sign()
    per_row = softplus(half) + weight * (error - error.detach())
    metrics = {
        "implicit_accuracy": rows.mean_metric((half < 0).float()),
        "pair_margin": rows.mean_metric(rows[MARGIN]),
        "flow_error": rows.mean_metric(error),
    }
    return LossOutput(rows.mean(per_row), metrics)
