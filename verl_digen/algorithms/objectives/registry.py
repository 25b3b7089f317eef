# SPDX-License-Identifier: Apache-2.0
"""Registry of objectives by name: register, find, call the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl_digen.algorithms.objectives.config import ClampedConfig, LossConfig
from verl_digen.algorithms.objectives.objective import (
    Joint,
    JointRows,
    Loss,
    Objective,
    Points,
    Policy,
    Select,
    Source,
    all_samples,
)
from verl_digen.algorithms.rows import LossInputs, LossOutput


def with_joint_column(
    joint: Joint, consumer: str, inputs: Mapping[str, Tensor], config: LossConfig
) -> dict[str, Tensor]:
    """Copy of `inputs` (of `policy_loss`) with the joint column [N], without gradient; rows under the mask take no
    part. Errors name the `consumer`."""
    wanted = "group" if joint.needs_groups else "sample"
    missing = [name for name in (wanted, "advantage", *joint.columns, *joint.latents) if name not in inputs]
    if missing:
        there = ", ".join(inputs) or "nothing"
        raise ValueError(
            f"{consumer} needs {joint.column}, or {', '.join(missing)} to make it of; its inputs hold {there}"
        )
    ids = [name for name in ("group", "sample", "point") if name in inputs]
    columns = tuple(dict.fromkeys(("advantage", *joint.columns, *ids)))
    with torch.no_grad():
        rows = LossInputs.check(consumer, inputs, columns=columns, latents=joint.latents)
        place = rows.is_row.nonzero()[:, 0]
        number = torch.arange(len(rows.is_row), device=place.device)
        numbers = {"group": number, "sample": number, "point": torch.zeros_like(number)}
        numbers |= {name: inputs[name].to(place.device).unique(return_inverse=True)[1] for name in ids}
        found = JointRows(
            scalars=joint.scalar(rows)[place],
            samples=numbers["sample"][place],
            groups=numbers["group"][place],
            points=numbers["point"][place],
            advantages=rows["advantage"][place],
        )
        column = torch.ones_like(rows["advantage"])
        column[place] = joint.combine(found, config).to(column)
    return {**inputs, joint.column: column}


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

    Args:
        inputs: those that `find_objective(name).loss.inputs_for(config)` lists; optionally `mask` and `num_rows`, see
            `LossInputs.check`. A joint column may be left out where these are all of its rows; it is then made from ids
            [N], `group` if a group's rows train together, else `sample`, and `point` if a sample has several rows.
        config: settings of the loss, as `default_config(name)` makes them.

    Raises:
        ValueError: unknown loss; settings of another loss; an input is missing or misshapen.
    """
    objective = find_objective(name)
    loss, joint = objective.loss, objective.joint
    if not isinstance(config, loss.config):
        raise ValueError(
            f"policy loss {name!r} needs settings of type {loss.config.__name__}, got {type(config).__name__}; "
            f"begin with default_config({name!r})"
        )
    others = {*loss.inputs_for(config)} - ({joint.column} if joint is not None else set())
    if joint is not None and joint.column not in inputs and others <= inputs.keys():
        inputs = with_joint_column(joint, f"policy loss {name!r}", inputs, config)
    latents = loss.latents_for(config)
    return loss.compute(
        LossInputs.check(f"policy loss {name!r}", inputs, columns=loss.columns_for(config), latents=latents), config
    )
