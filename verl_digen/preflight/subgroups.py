# SPDX-License-Identifier: Apache-2.0
"""Rules for training samples before their group is complete (`digen.gap.subgroups`), which must be exact."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_digen.config import DigenConfig, digen_config
from verl_digen.preflight.rewards import reward_weights
from verl_digen.require import require
from verl_digen.reward.named import scope_of

KEY = "digen.gap.subgroups"
OFF = f"leave {KEY} out: whole groups train with every setting"


def check_subgroups(config: DictConfig) -> None:
    """Require a gradient that is linear in the advantage, and rewards and a choice of samples that need no whole group.

    That a batch is one optimizer step on separate pools is checked for all runs.
    """
    from verl_digen.algorithms.objectives import find_objective, objective_names

    digen = digen_config(config)
    if not digen.gap.subgroups:
        return
    linear = [name for name in objective_names() if find_objective(name).loss.linear]
    require(
        digen.loss_name in linear,
        f"digen.loss.name must be one of {', '.join(linear)} with {KEY}=true, which are linear in the advantage",
        digen.loss_name,
        OFF,
    )
    require(
        digen.staleness.max_versions == 0,
        f"digen.staleness.max_versions must be 0 with {KEY}=true, which needs a ratio of 1",
        digen.staleness.max_versions,
        OFF,
    )
    require(
        digen.denominator != "rollout",
        f"digen.loss.old_log_probs must be auto or recompute with {KEY}=true, which needs a ratio of exactly 1",
        digen.old_log_probs,
        f"leave it at auto, or {OFF}",
    )
    require(
        digen.gap.enable,
        f"digen.gap.enable must be true with {KEY}=true: at a barrier nothing trains before the batch is complete",
        digen.gap.enable,
        "leave out one of them",
    )
    require(
        not digen.branches.splits,
        f"digen.branches.splits must be [] with {KEY}=true: an advantage in a tree depends on several means",
        list(digen.branches.splits),
        OFF,
    )
    _check_groups(config, digen)


def _check_groups(config: DictConfig, digen: DigenConfig) -> None:
    """Require that a sample's reward, and whether it trains, do not depend on its whole group."""
    from verl_digen.algorithms.objectives.objective import all_samples

    require(
        digen.reward.combine != "gdpo",
        f"digen.reward.combine must not be gdpo with {KEY}=true: every reward has a mean and a scale of its own",
        digen.reward.combine,
        OFF,
    )
    require(
        digen.advantage.best_of is None and digen.select is all_samples,
        f"digen.advantage.best_of must be null with {KEY}=true: which samples train is known with the whole group",
        digen.advantage.best_of,
        OFF,
    )
    require(
        not digen.environment.is_on,
        f"{KEY} must be false with an environment, whose episodes train with their whole group",
        digen.gap.subgroups,
        OFF,
    )
    weights = reward_weights(config)
    compare = [entry.name for entry in digen.reward.entries if scope_of(entry) == "group" and weights.get(entry.name)]
    require(
        not compare,
        f"{KEY} must be false with {', '.join(compare)}, which scores samples when their whole group is there",
        digen.gap.subgroups,
        OFF,
    )
