# SPDX-License-Identifier: Apache-2.0
"""A note where validation solves the ODE otherwise than the checkpoint's own scheduler does."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_digen.algorithms.solvers import FIRST_ORDER, SCHEDULERS
from verl_digen.config import DigenConfig


def solver_notes(config: DictConfig, digen: DigenConfig) -> list[str]:
    """A sentence that names both solvers, or none."""
    path = config.actor_rollout_ref.model.path
    if "://" in path:  # on a remote file system: verl fetches it once the run has started
        return []
    from verl_digen.models import load_model  # imports diffusers: a start that is refused earlier needs none
    from verl_digen.models.locate import locate_configs

    scheduler = load_model(locate_configs(path)).scheduler
    named, chosen = SCHEDULERS.get(scheduler), digen.sampling.val_solver
    if named == chosen or (named in FIRST_ORDER and chosen in FIRST_ORDER):
        return []
    remedy = f"; digen.sampling.val_solver={named} is its solver" if named else ""
    return [
        f"the checkpoint names {scheduler}: its sigmas are used, in training with digen.sampling.solver="
        f"{digen.sampling.solver} and in validation with digen.sampling.val_solver={chosen}{remedy}"
    ]
