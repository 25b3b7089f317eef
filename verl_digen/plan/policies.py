# SPDX-License-Identifier: Apache-2.0
"""Policies that a run keeps or evaluates besides the one that trains. A user's own objective counts without its own."""

from __future__ import annotations

from collections.abc import Mapping

from verl_digen.algorithms.objectives import find_objective, objective_names
from verl_digen.algorithms.objectives.objective import TEACHER, policy_output
from verl_digen.algorithms.objectives.teacher import Teacher
from verl_digen.config import DigenConfig


def policies_read(digen: DigenConfig) -> set[str]:
    """Policies that cost a forward of every row, besides its teacher."""
    read = {"reference"} if digen.kl.coef > 0 else set()
    if digen.loss_name not in objective_names():
        return read
    objective, settings = find_objective(digen.loss_name), digen.loss_settings
    named = {found[0] for name in objective.latents_for(settings) if (found := policy_output(name))}
    return (read | (named if objective.behaviour == "old" else named - {"old"})) - {TEACHER}  # old is the current one


def policies_that_follow(digen: DigenConfig) -> tuple[str, ...]:
    """Policies with a copy of the trained weights, besides the average of `digen.ema`."""
    return tuple(digen.loss_settings.copies) if digen.loss_name in objective_names() else ()


def num_selected(digen: DigenConfig, group_size: int) -> int:
    """Samples of a group that train, if its rewards differ."""
    return len(digen.select(range(group_size))) if digen.loss_name in objective_names() else group_size


def has_reference(digen: DigenConfig, *, is_lora: bool) -> bool:
    """True if the reference is a frozen copy of the weights; of an adapter it is the bare model, and one that the
    objective renews follows."""
    return "reference" in policies_read(digen) - {*policies_that_follow(digen)} and not is_lora


def teachers(digen: DigenConfig) -> Mapping[str, Teacher]:
    """Teachers by name; a user's own objective has none here."""
    return digen.loss_settings.taught_by if digen.loss_name in objective_names() else {}
