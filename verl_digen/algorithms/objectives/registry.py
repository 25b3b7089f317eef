# SPDX-License-Identifier: Apache-2.0
"""Registry of objectives by name: register, find, call the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from verl_digen.algorithms.objectives.config import ClampedConfig, LossConfig
from verl_digen.algorithms.objectives.objective import (
    Joint,
    Loss,
    Objective,
    Points,
    Policy,
    Select,
    Source,
    all_samples,
)
from verl_digen.algorithms.rows import LossInputs, LossOutput

LossFn = Callable[[LossInputs, Any], LossOutput]

_OBJECTIVES: dict[str, Objective] = {}


def register_objective(
    *names: str,
    config: type[LossConfig] = ClampedConfig,
    points: Points = "path",
    columns: Sequence[str] = (),
    latents: Sequence[str] = (),
    homogeneous: bool = False,
    off_policy: bool = False,
    laws: Sequence[str] = (),
    behaviour: Policy = "current",
    select: Select = all_samples,
    joint: Joint | None = None,
    shares_noise: bool = False,
    source: Source = "policy",
) -> Callable[[LossFn], LossFn]:
    """Register an objective under `names`, by its loss and the inputs that it needs, at least one. The arguments are
    fields of `Objective` and of its `Loss`; the package lists `columns`, to which `joint.column` is added, and
    `latents`.

    `homogeneous` False is always safe: if the advantage scale needs the whole batch, such a loss waits for the batch.
    `behaviour` "old" needs settings with a copy of that name. ValueError if a name is taken, or training has no such
    input.
    """
    if not names or not (columns or latents):
        raise ValueError(
            f"an objective must have a name and an input, got names {names} and inputs {(*columns, *latents)}; "
            "write @register_objective(NAME, columns=(...))"
        )

    def file(compute: LossFn) -> LossFn:
        loss = Loss(compute, config, tuple(columns), tuple(latents), homogeneous, off_policy, tuple(laws))
        for name in names:
            if name in _OBJECTIVES:
                raise ValueError(f"an objective named {name!r} exists already; choose another name")
            objective = Objective(name, points, loss, behaviour, select, joint, shares_noise, source)
            objective.check_inputs(config())
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
    return find_objective(name).loss.config()


def policy_loss(name: str, inputs: Mapping[str, Tensor], config: LossConfig) -> LossOutput:
    """Loss `name` of N rows, as their share of the logical batch's mean.

    `inputs` holds those that `find_objective(name).loss.inputs_for(config)` lists, a joint column among them;
    optionally `mask` and `num_rows`, see `LossInputs.check`. `config`: settings of the loss, as `default_config(name)`
    makes them. ValueError for an unknown loss, settings of another loss, or an input that is missing or misshapen.
    """
    loss = find_objective(name).loss
    if not isinstance(config, loss.config):
        raise ValueError(
            f"policy loss {name!r} needs settings of type {loss.config.__name__}, got {type(config).__name__}; "
            f"begin with default_config({name!r})"
        )
    columns, latents = loss.columns_for(config), loss.latents_for(config)
    return loss.compute(LossInputs.check(f"policy loss {name!r}", inputs, columns=columns, latents=latents), config)
