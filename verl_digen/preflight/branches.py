# SPDX-License-Identifier: Apache-2.0
"""Rules for trees (`digen.branches`) that span verl's keys and ours."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_digen.config import digen_config
from verl_digen.preflight.agent_loop import SECTION
from verl_digen.require import require


def check_branches(config: DictConfig) -> None:
    """Require as many samples of a prompt as a tree has leaves, and prompts that no agent loop rewrites."""
    from verl_digen.sampling.requests import SINGLE_TURN

    branches, num_samples = digen_config(config).branches, config.actor_rollout_ref.rollout.n
    if not branches.splits:
        return
    num_leaves = branches.factor ** len(branches.splits)
    require(
        num_leaves == num_samples,
        f"actor_rollout_ref.rollout.n must be {num_leaves}, the leaves of a tree with digen.branches.splits="
        f"{list(branches.splits)} and digen.branches.factor={branches.factor}",
        num_samples,
        "set it, or split another number of times",
    )
    name = config.actor_rollout_ref.rollout.agent.default_agent_loop
    require(
        name == SINGLE_TURN,
        f"{SECTION}.default_agent_loop must be {SINGLE_TURN} with digen.branches.splits: samples with prompts of their "
        "own share no steps",
        name,
        "leave it out, or set digen.branches.splits=[]",
    )
