# SPDX-License-Identifier: Apache-2.0
"""The planner's rules of a run, from its config: for the run itself, its plan, and what it simulates of itself."""

from __future__ import annotations

from verl_digen.config import DigenConfig
from verl_digen.sampling.requests import rows_per_group
from verl_digen.schedulers.rules import BatchRules


def groups_are_alike(digen: DigenConfig) -> bool:
    """True if the samples of all groups take the same forwards, so that ranks may generate different groups in step.

    Not where samples of a group share the steps before their window, or pass over steps outside of it: that depends
    on the group's window, and on how many of the group a rank has. Other windows than consecutive ones begin at step 0.
    """
    has_steps_before = digen.window.kind == "consecutive" and not digen.trains_forward_points
    return not has_steps_before or not (digen.sampling.shared_initial_noise or digen.sampling.outside.passes_over)


def batch_rules(digen: DigenConfig, *, num_prompts: int, group_size: int, num_trainer_ranks: int) -> BatchRules:
    """The planner's rules, from the config."""
    return BatchRules(
        num_prompts,
        group_size,
        gap=digen.gap,
        queue=digen.queue,
        tag=digen.tag,
        staleness=digen.staleness,
        rows_per_group=rows_per_group(digen, group_size),
        max_chunk_size=digen.rollout.batch_size,
        slots_per_replica=digen.slots_per_replica,
        num_trainer_ranks=num_trainer_ranks,
        assist_spans_groups=groups_are_alike(digen),
        max_group_refills=digen.most_group_refills(num_prompts),
    )
