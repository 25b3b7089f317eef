# SPDX-License-Identifier: Apache-2.0
"""The planner's rules of a run, from its config: for the run itself, its plan, and what it simulates of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from verl_digen.config import DigenConfig
from verl_digen.schedulers.rules import BatchRules

if TYPE_CHECKING:
    from verl_digen.schedulers.rules import AssistPolicy


def batch_rules(digen: DigenConfig, *, num_prompts: int, group_size: int, num_trainer_ranks: int) -> BatchRules:
    """The planner's rules, from the config."""
    gap, queue = digen.gap, digen.queue
    return BatchRules(
        num_prompts=num_prompts,
        group_size=group_size,
        is_pipelined=gap.enable,
        chunk_size=None if isinstance(gap.chunk_size, str) else gap.chunk_size,
        max_chunk_size=digen.rollout.max_batch_size,
        replicate_prompts=queue.replicate_prompts,
        min_groups_per_fragment=gap.least_groups,
        merges=gap.min_groups_per_fragment == "auto",
        max_groups_per_fragment=gap.max_groups_per_fragment,
        extra_prompts=queue.extra_prompts,
        drop_zero_spread=queue.drop_zero_spread,
        max_group_refills=digen.most_group_refills(num_prompts),
        max_sample_refills=queue.most_sample_refills(group_size),
        assist=cast("AssistPolicy", digen.tag.policy),
        num_trainer_ranks=num_trainer_ranks,
        assist_chunk_size=None if isinstance(digen.tag.chunk_size, str) else digen.tag.chunk_size,
        max_versions=digen.staleness.max_versions,
        fraction=digen.staleness.fraction,
    )
