# SPDX-License-Identifier: Apache-2.0
"""`Objective`: what is trained, as one value, which one file of this folder chooses and registers by name. Its settings
are the keys under `digen.loss`: every loss has a dataclass of its own.

Policies besides the one that trains follow from the names of the inputs: a loss that reads `old_velocity` has policy
`old` evaluated.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from torch import Tensor

from verl_digen.algorithms.ema import Decay
from verl_digen.algorithms.rows import LossInputs, LossOutput, Metric
from verl_digen.algorithms.sde import LAWS
from verl_digen.require import In, Section, refusing, require, require_one_of, require_value


@dataclass(frozen=True)
class LossConfig(Section, key="digen.loss"):
    """Settings of a loss without any."""

    @property
    def advantage_bound(self) -> float:
        """Advantages are clamped to +- this by the loss; inf: they are not."""
        return math.inf

    def unclamped(self) -> "LossConfig":
        """Copy for advantages that are divided by their scale later, and must not be clamped before. A loss that is not
        homogeneous never trains on such."""
        return self

    @property
    def clip_widths(self) -> Mapping[str, float]:
        """Keys under `digen.loss` -> distance from 1 at which they take a row's ratio out of the gradient."""
        return {}

    @property
    def more_columns(self) -> tuple[str, ...]:
        """Columns that the loss reads with these settings, besides those that it always reads."""
        return ()

    @property
    def more_latents(self) -> tuple[str, ...]:
        """Latents that the loss reads with these settings, besides those that it always reads."""
        return ()

    @property
    def copies(self) -> Mapping[str, Decay]:
        """EMA copies of the trained policy: name -> decay of its average."""
        return {}

    @property
    def taught_by(self) -> str | None:
        """Folder of the LoRA adapter that is policy `teacher`; None for a loss without a teacher."""
        return None


@dataclass(frozen=True)
class ClampedConfig(LossConfig):
    """Settings that every loss of clamped advantages has."""

    advantage_clip: Annotated[float, In("(0, inf]"), "inf (in a file .inf) never clamps"] = 5.0
    """Advantages are clamped to +- this (5 in Flow-GRPO). .inf: no clamping."""

    @property
    def advantage_bound(self) -> float:
        return self.advantage_clip

    def unclamped(self) -> "ClampedConfig":
        return replace(self, advantage_clip=math.inf)


@dataclass(frozen=True)
class ClipConfig(ClampedConfig):
    """Settings of losses with PPO's clip."""

    clip_range: Annotated[float, In("(0, 1)"), "1e-5 to 1e-3 are usual"] = 1e-4
    """The importance ratio is clipped below, at 1 - clip_range; small because log-probs are means over latent
    dims. 1e-4 in Flow-GRPO (SD3.5), 1e-5 in Flow-GRPO-Fast and for Qwen-Image, 1e-3 for Wan. SDE law cps has
    another scale."""
    clip_range_high: Annotated[float | None, In("(0, inf)"), "null takes digen.loss.clip_range"] = None
    """The importance ratio is clipped above, at 1 + clip_range_high. null: clip_range."""

    @property
    def ratio_range(self) -> tuple[float, float]:
        """(1 - clip_range, 1 + clip_range_high)."""
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return 1 - self.clip_range, 1 + high

    @property
    def clip_widths(self) -> Mapping[str, float]:
        high = {} if self.clip_range_high is None else {"clip_range_high": self.clip_range_high}
        return {"clip_range": self.clip_range, **high}


BEHAVIOUR = "behaviour_log_prob"
"""Column: log-prob under the policy that generated the sample, recorded at generation."""
OLD = "old_log_prob"
"""Column: log-prob under the policy before the update, see `verl_digen.algorithms.objectives.denominator`."""

LossFn = Callable[[LossInputs, Any], LossOutput]
"""Function of a loss: (checked inputs, settings of the loss's own class) -> output."""
PointKind = Literal["path", "forward"]
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
COLUMNS: dict[PointKind, tuple[str, ...]] = {
    "path": (*ANY_COLUMNS, "log_prob", BEHAVIOUR, OLD, "std", "noise_rate", "sigma_next", "sigma_max"),
    "forward": ANY_COLUMNS,
}
"""Kind of points -> inputs [N] that its rows have; see the package."""
OUTPUTS: dict[PointKind, tuple[str, ...]] = {"path": ("mean", *ANY_LATENTS), "forward": ANY_LATENTS}
"""Kind of points -> outputs of a policy on a row, [N, ...] each."""
TEACHER = "teacher"
"""Policy of the adapter `LossConfig.taught_by`."""
POLICIES = ("old", "reference", TEACHER)
"""Policies that every objective may read, besides the one that trains and its own `LossConfig.copies`."""
RECORDED: dict[PointKind, tuple[str, ...]] = {
    "path": ("latents", "next_latents"),
    "forward": ("clean", "noisy", "noise"),
}
"""Kind of points -> latents [N, ...] that do not depend on a policy; see the package."""


def policy_output(name: str) -> tuple[str, str] | None:
    """(policy, its output) of an input: `old_mean` is the output `mean` of policy `old`; None for other inputs."""
    policy, _, output = name.rpartition("_")
    return (policy, output) if policy and output in OUTPUTS["path"] else None


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
    compute: LossFn
    config: type[LossConfig] = ClampedConfig
    """Class of the loss's settings; every field has a default."""
    points: PointKind = "path"
    columns: Sequence[str] = ()
    latents: Sequence[str] = ()
    homogeneous: bool = False
    """True: the loss is proportional to the advantage; see the package. False is always safe: if the advantage scale
    needs the whole batch, the loss waits for the batch."""
    off_policy: bool = False
    """True: sound with `digen.staleness.max_versions` > 1."""
    laws: Sequence[str] = ()
    """Values of `digen.sde.law` that it is defined for; (): all."""
    behaviour: Policy = "current"
    """Policy that replicas serve for training samples; `old` is the copy of that name in `LossConfig.copies`."""
    select: Select = all_samples
    joint: Joint | None = None
    shares_noise: bool = False
    """True: forward points of a group's samples have the same noise."""
    source: Source = "policy"

    def columns_for(self, settings: LossConfig) -> tuple[str, ...]:
        """Columns that the loss reads with these settings."""
        return (*self.columns, *settings.more_columns)

    def latents_for(self, settings: LossConfig) -> tuple[str, ...]:
        """Latents that the loss reads with these settings."""
        return (*self.latents, *settings.more_latents)

    def inputs_for(self, settings: LossConfig) -> tuple[str, ...]:
        """Names of all inputs that the loss reads with these settings."""
        return (*self.columns_for(settings), *self.latents_for(settings))

    @property
    def joint_latents(self) -> tuple[str, ...]:
        """Latents that the joint column reads."""
        return () if self.joint is None else self.joint.latents

    def reads_advantages(self, settings: LossConfig) -> bool:
        """True if the loss depends on rewards with these settings."""
        return self.joint is not None or "advantage" in self.columns_for(settings)

    def policies_for(self, settings: LossConfig) -> set[str]:
        """Policies whose forwards it needs with these settings, besides the one that trains."""
        latents = (*self.latents_for(settings), *self.joint_latents)
        return {read[0] for name in latents if (read := policy_output(name))}

    def reads_old_weights(self, settings: LossConfig) -> bool:
        """True if it needs a forward of the policy before the update, not its log-probs alone. A policy `old` that
        generates the samples is an EMA copy instead, see `LossConfig.copies`."""
        return self.behaviour != "old" and "old" in self.policies_for(settings)

    def check_inputs(self, settings: LossConfig) -> None:
        """ValueError unless training has the inputs with these settings, and copies for the policies among them."""
        for argument, value, allowed in (
            ("points", self.points, OUTPUTS),
            ("behaviour", self.behaviour, get_args(Policy)),
            ("source", self.source, get_args(Source)),
            *(("laws", law, LAWS) for law in self.laws),
        ):
            require_one_of(f"{argument} of the objective {self.name!r}", value, allowed)
        if self.source == "dataset":
            key, why = f"points of the objective {self.name!r}", "with source=dataset: a picture has no path"
            require_value(key, self.points, "forward", why, "change one of them")
        made = () if self.joint is None else (self.joint.column,)
        outputs, policies = OUTPUTS[self.points], {*POLICIES, *settings.copies}
        of_policies = (f"{policy}_{output}" for policy in policies for output in outputs)
        known_latents = (*RECORDED[self.points], *outputs, *of_policies)
        for argument, given, known in (
            ("columns", self.columns_for(settings), (*COLUMNS[self.points], *made)),
            ("latents", self.latents_for(settings), known_latents),
            ("columns of the joint column", () if self.joint is None else self.joint.columns, COLUMNS[self.points]),
            ("latents of the joint column", self.joint_latents, known_latents),
        ):
            for name in given:
                require_one_of(f"{argument} of the objective {self.name!r}", name, known)
        inputs, trained = self.inputs_for(settings), ("log_prob", *outputs) if self.points == "path" else outputs
        rule = f"inputs of the objective {self.name!r} must have {' or '.join(trained)}, which alone have a gradient"
        require(not {*inputs}.isdisjoint(trained), rule, inputs, "add what the loss trains to its columns or latents")
        wanted, number = ("old", "a") if "old" in settings.copies else ("current", "no")
        key, why = f"behaviour of the objective {self.name!r}", f"because its settings keep {number} copy `old`"
        require_value(key, self.behaviour, wanted, why, f"change it, or {type(settings).__name__}.copies")


_OBJECTIVES: dict[str, Objective] = {}


def register_objective(*names: str, **declared: Any) -> Callable[[LossFn], LossFn]:
    """Register an objective under `names`, by its loss and the inputs that it needs, at least one. `declared` are
    fields of `Objective`; the package lists `columns`, to which `joint.column` is added, and `latents`. ValueError if a
    name is taken, or training has no such input."""
    for argument in {*declared} & {"columns", "latents", "laws"}:
        given = declared[argument]
        rule = f"{argument} of an objective must be a tuple of names"
        require(not isinstance(given, str), rule, given, f"write ({given!r},), with the comma")
    settings, rule = declared.get("config", ClampedConfig), "config of an objective must be a class of LossConfig"
    is_config = isinstance(settings, type) and issubclass(settings, LossConfig)
    require(is_config, rule, settings, "derive it from ClampedConfig")
    inputs = (*declared.get("columns", ()), *declared.get("latents", ()))
    if not names or not inputs:
        raise ValueError(
            f"an objective must have a name and an input, got names {names} and inputs {inputs}; "
            "write @register_objective(NAME, columns=(...))"
        )

    def file(compute: LossFn) -> LossFn:
        for name in names:
            if name in _OBJECTIVES:
                raise ValueError(f"an objective named {name!r} exists already; choose another name")
            with refusing(f"the loss {name!r} must be a function", compute, "write def loss(rows, config)"):
                inspect.signature(compute).bind("rows", "config")
            objective = Objective(name, compute, **declared)
            rule = f"select of the objective {name!r} must be a function"
            with refusing(rule, objective.select, "write def select(rewards)"):
                inspect.signature(objective.select).bind("rewards")
            objective.check_inputs(objective.config())
            _OBJECTIVES[name] = objective
        return compute

    return file


def objective_names() -> tuple[str, ...]:
    """The names that are registered, sorted: values of `digen.loss.name`."""
    return tuple(sorted(_OBJECTIVES))


def find_objective(name: str) -> Objective:
    """The objective `name`. ValueError if there is none."""
    if name not in _OBJECTIVES:
        raise ValueError(f"unknown policy loss {name!r}; known losses: {', '.join(objective_names())}")
    return _OBJECTIVES[name]


def default_config(name: str) -> Any:
    """Default settings of loss `name`, a frozen dataclass of its own. ValueError if there is no such loss."""
    return find_objective(name).config()


def policy_loss(name: str, inputs: Mapping[str, Tensor], config: LossConfig) -> LossOutput:
    """Loss `name` of N rows, as their share of the logical batch's mean.

    `inputs` holds those that `find_objective(name).inputs_for(config)` lists, a joint column among them; optionally
    `mask` and `num_rows`, see `LossInputs.check`. `config`: settings of the loss, as `default_config(name)` makes them.
    ValueError for an unknown loss, or an input that is missing or misshapen.
    """
    objective = find_objective(name)
    columns, latents = objective.columns_for(config), objective.latents_for(config)
    rows = LossInputs.check(f"policy loss {name!r}", inputs, columns=columns, latents=latents)
    output = objective.compute(rows, config)
    rule = f"policy loss {name!r} must return a LossOutput"
    remedy = "write return LossOutput(rows.mean(per_row), {NAME: rows.mean_metric(per_row)})"
    require(isinstance(output, LossOutput), rule, type(output).__name__, remedy)
    shape = output.loss.shape if isinstance(output.loss, Tensor) else output.loss
    require(shape == (), f"{rule} of a scalar", shape, remedy)
    trains = output.loss.requires_grad or not any(rows[name].requires_grad for name in (*columns, *latents))
    require(trains, f"{rule} whose loss has a gradient", output.loss, "detach none of its inputs")
    require(
        all(isinstance(one, Metric) for one in output.metrics.values()), f"{rule} of Metrics", output.metrics, remedy
    )
    return output
