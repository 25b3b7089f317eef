# SPDX-License-Identifier: Apache-2.0
"""Policies that a run keeps or evaluates besides the one that trains. A user's own objective counts without its own."""

from __future__ import annotations

from verl_digen.algorithms.objectives import find_objective, objective_names
from verl_digen.algorithms.objectives.objective import TEACHER
from verl_digen.config import DigenConfig


def policies_read(digen: DigenConfig) -> set[str]:
    """Policies that cost a forward of every row."""
    read = {"reference"} if digen.kl.coef > 0 else set()
    if digen.loss_name not in objective_names():
        return read
    objective = find_objective(digen.loss_name)
    named = objective.policies_for(digen.loss_settings)
    return read | (named if objective.behaviour == "old" else named - {"old"})  # old is the current one


def policies_that_follow(digen: DigenConfig) -> tuple[str, ...]:
    """Policies with a copy of the trained weights, besides the average of `digen.ema`."""
    return tuple(digen.loss_settings.copies) if digen.loss_name in objective_names() else ()


def num_selected(digen: DigenConfig, group_size: int) -> int:
    """Samples of a group that train, if its rewards differ."""
    return len(digen.select(range(group_size))) if digen.loss_name in objective_names() else group_size


def frozen_copies(digen: DigenConfig, *, is_lora: bool) -> tuple[str, ...]:
    """Policies with a copy of the trained weights that stays as it is: the teacher, and the reference, which of an
    adapter is the bare model, and follows if the objective renews it."""
    read = policies_read(digen) - {*policies_that_follow(digen)} - ({"reference"} if is_lora else set())
    return tuple(policy for policy in ("reference", TEACHER) if policy in read)
