# SPDX-License-Identifier: Apache-2.0
"""Rules of the planner with their sections' fields by one name each."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

from verl_digen.schedulers.rules import BatchRules, GapConfig, QueueConfig

NAMES = {
    "is_pipelined": ("gap", "enable"),
    "chunk_size": ("gap", "chunk_size"),
    "min_groups_per_fragment": ("gap", "min_groups_per_fragment"),
    "max_groups_per_fragment": ("gap", "max_groups_per_fragment"),
    "replicate_prompts": ("queue", "replicate_prompts"),
    "extra_prompts": ("queue", "extra_prompts"),
    "drop_zero_spread": ("queue", "drop_zero_spread"),
    "max_sample_refills": ("queue", "max_sample_refills"),
    "assist": ("tag", "policy"),
    "assist_chunk_size": ("tag", "chunk_size"),
    "max_versions": ("staleness", "max_versions"),
    "fraction": ("staleness", "fraction"),
}


def changed(rules: BatchRules, *, merges: bool | None = None, **flat: Any) -> BatchRules:
    """A copy with other values; None is auto."""
    if merges is not None:
        flat["min_groups_per_fragment"] = None if merges else flat.get("min_groups_per_fragment", 1)
    sections: dict[str, dict[str, Any]] = defaultdict(dict)
    for name in flat.keys() & NAMES.keys():
        section, field = NAMES[name]
        value = flat.pop(name)
        sections[section][field] = "auto" if value is None else value
    return replace(rules, **flat, **{name: replace(getattr(rules, name), **new) for name, new in sections.items()})


def make_rules(num_prompts: int, group_size: int, **flat: Any) -> BatchRules:
    """Strict rules that train what is ready, except for `flat`."""
    gap, queue = GapConfig(min_groups_per_fragment=1), QueueConfig(max_sample_refills=0)
    return changed(BatchRules(num_prompts, group_size, gap=gap, queue=queue), **flat)
