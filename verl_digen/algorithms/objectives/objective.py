# SPDX-License-Identifier: Apache-2.0
"""`Objective`: what is trained, as one value, which one file of this folder chooses.

Policies besides the one that trains follow from the names of the inputs: a loss that reads `old_velocity` has policy
`old` evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from verl_digen.algorithms.objectives.config import LossConfig
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.require import require, require_one_of

BEHAVIOUR = "behaviour_log_prob"
"""Column: log-prob under the policy that generated the sample, recorded at generation."""
OLD = "old_log_prob"
"""Column: log-prob under the policy before the update, see `verl_digen.algorithms.objectives.denominator`."""

Points = Literal["path", "forward"]
"""Kinds of points. path: recorded SDE transitions x -> x' of the group's window (`digen.window`), with log-probs.
forward: clean latents x_0, noised again at training time (`digen.forward`); samples come from the ODE."""
Policy = Literal["current", "old"]
"""Policies that replicas can serve: `current` is the one that trains."""
Source = Literal["policy", "dataset"]
"""Sources of the samples that train. policy: replicas generate them, and rewards score them.
dataset: a prompt's row brings a pair of pictures, chosen and rejected, which replicas encode. Forward points alone."""

ANY_COLUMNS = ("advantage", "reward", "sigma")
ANY_LATENTS = ("velocity",)
"""Inputs that rows of every kind of points have."""
COLUMNS: dict[Points, tuple[str, ...]] = {
    "path": (*ANY_COLUMNS, "log_prob", BEHAVIOUR, OLD, "std", "noise_rate", "sigma_next", "sigma_max"),
    "forward": ANY_COLUMNS,
}
"""Kind of points -> inputs [N] that its rows have; see the package."""
OUTPUTS: dict[Points, tuple[str, ...]] = {"path": ("mean", *ANY_LATENTS), "forward": ANY_LATENTS}
"""Kind of points -> outputs of a policy on a row, [N, ...] each."""
TEACHER = "teacher"
"""Policy of the adapter `LossConfig.taught_by`."""
POLICIES = ("old", "reference", TEACHER)
"""Policies that every objective may read, besides the one that trains and its own `LossConfig.copies`."""
RECORDED: dict[Points, tuple[str, ...]] = {"path": ("latents", "next_latents"), "forward": ("clean", "noisy", "noise")}
"""Kind of points -> latents [N, ...] that do not depend on a policy; see the package."""


def policy_output(name: str) -> tuple[str, str] | None:
    """(policy, its output) of an input: `old_mean` is the output `mean` of policy `old`; None for other inputs."""
    policy, _, output = name.rpartition("_")
    return (policy, output) if policy and output in OUTPUTS["path"] else None


@dataclass(frozen=True)
class Loss:
    """The function of a row, and what it reads."""

    compute: Callable[[LossInputs, Any], LossOutput]
    """(checked inputs, settings of the loss's own class) -> output."""
    config: type[LossConfig]
    """Class of its settings; every field has a default."""
    columns: tuple[str, ...]
    latents: tuple[str, ...]
    homogeneous: bool
    """True: proportional to the advantage; see the package."""
    off_policy: bool
    """True: sound with `digen.staleness.max_versions` > 1."""
    laws: tuple[str, ...]
    """Values of `digen.sde.law` that it is defined for; (): all."""

    def columns_for(self, config: LossConfig) -> tuple[str, ...]:
        """Columns that it reads with these settings."""
        return (*self.columns, *config.more_columns)

    def latents_for(self, config: LossConfig) -> tuple[str, ...]:
        """Latents that it reads with these settings."""
        return (*self.latents, *config.more_latents)

    def inputs_for(self, config: LossConfig) -> tuple[str, ...]:
        """Names of all inputs that it reads with these settings."""
        return (*self.columns_for(config), *self.latents_for(config))


@dataclass(frozen=True)
class JointRows:
    """All M rows of a fragment, on every rank: what a joint column is made of."""

    scalars: Tensor
    """[M] fp32: `Joint.scalar` of each row."""
    samples: Tensor
    """[M] int: number of the row's sample."""
    groups: Tensor
    """[M] int: number of the row's group."""
    points: Tensor
    """[M] int: number of the row's point in its sample."""
    advantages: Tensor
    """[M] fp32."""


@dataclass(frozen=True)
class Joint:
    """A column whose value in a row depends on other rows, too.

    Before a fragment trains, all its rows run a forward without gradient. Each gives one number, the ranks exchange
    these numbers, and `combine` makes the column. It has no gradient: the loss writes the whole gradient, which is a
    coefficient from the column times each row's own gradient.
    """

    column: str
    """Name of the input that it makes, [N]."""
    columns: tuple[str, ...]
    """Inputs [N] that `scalar` reads."""
    scalar: Callable[[LossInputs], Tensor]
    """Inputs -> [N] fp32."""
    combine: Callable[[JointRows, Any], Tensor]
    """(all rows, settings of the loss) -> [M] fp32."""
    latents: tuple[str, ...] = ()
    """Inputs [N, ...] that `scalar` reads."""
    needs_groups: bool = False
    """True: a group's rows train together. False: a sample's rows do, and no more."""


Select = Callable[[Sequence[float]], Sequence[int]]
"""Rewards of a group's samples -> positions of those that train. The others count for the group's advantages."""


def all_samples(rewards: Sequence[float]) -> Sequence[int]:
    """Select every sample."""
    return range(len(rewards))


def best_and_worst(rewards: Sequence[float], count: int) -> Sequence[int]:
    """Select `count` samples, half with the highest and half with the lowest rewards, or all if there are fewer.
    Of equal samples the first is the better one. Source: DanceGRPO, arXiv 2505.07818.

    Example:
        best_and_worst([3.0, 0.0, 1.0, 2.0], 2)  # [0, 1]
    """
    ranked = sorted(range(len(rewards)), key=lambda position: -rewards[position])
    dropped = {*ranked[count // 2 : len(ranked) - count // 2]} if count < len(ranked) else set()
    return [position for position in range(len(rewards)) if position not in dropped]


@dataclass(frozen=True)
class Objective:
    """The value that a run trains by."""

    name: str
    points: Points
    loss: Loss
    behaviour: Policy = "current"
    """Policy that replicas serve for training samples; `old` is the copy of that name in `LossConfig.copies`."""
    select: Select = all_samples
    joint: Joint | None = None
    shares_noise: bool = False
    """True: forward points of a group's samples have the same noise."""
    source: Source = "policy"

    def latents_for(self, settings: LossConfig) -> tuple[str, ...]:
        """Latents that the loss and the joint column read with these settings."""
        return (*self.loss.latents_for(settings), *(() if self.joint is None else self.joint.latents))

    def reads_advantages(self, settings: LossConfig) -> bool:
        """True if the loss depends on rewards with these settings."""
        return self.joint is not None or "advantage" in self.loss.columns_for(settings)

    def policies_for(self, settings: LossConfig) -> set[str]:
        """Policies whose forwards it needs with these settings, besides the one that trains."""
        return {read[0] for name in self.latents_for(settings) if (read := policy_output(name))}

    def reads_old_weights(self, settings: LossConfig) -> bool:
        """True if it needs a forward of the policy before the update, not its log-probs alone. A policy `old` that
        generates the samples is an EMA copy instead, see `LossConfig.copies`."""
        return self.behaviour != "old" and "old" in self.policies_for(settings)

    def check_inputs(self, settings: LossConfig) -> None:
        """ValueError unless training has the inputs with these settings, and copies for the policies among them."""
        require(
            self.source == "policy" or self.points == "forward",
            f"points of the objective {self.name!r} must be forward with source={self.source}: a picture has no path",
            self.points,
            "change one of them",
        )
        made = () if self.joint is None else (self.joint.column,)
        outputs, policies = OUTPUTS[self.points], {*POLICIES, *settings.copies}
        of_policies = (f"{policy}_{output}" for policy in policies for output in outputs)
        known_latents = (*RECORDED[self.points], *outputs, *of_policies)
        for argument, given, known in (
            ("columns", self.loss.columns_for(settings), (*COLUMNS[self.points], *made)),
            ("latents", self.loss.latents_for(settings), known_latents),
            ("columns of the joint column", () if self.joint is None else self.joint.columns, COLUMNS[self.points]),
            ("latents of the joint column", () if self.joint is None else self.joint.latents, known_latents),
        ):
            for name in given:
                require_one_of(f"{argument} of the objective {self.name!r}", name, known)
        serves_copy, has_copy = self.behaviour == "old", "old" in settings.copies
        require(
            serves_copy == has_copy,
            f"behaviour of the objective {self.name!r} must be {'old' if has_copy else 'current'}, because its "
            f"settings keep {'a' if has_copy else 'no'} copy `old`",
            self.behaviour,
            f"change it, or {type(settings).__name__}.copies",
        )
