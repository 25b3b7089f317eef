# SPDX-License-Identifier: Apache-2.0
"""Rules of the planner with their sections' fields by one name each."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

from verl_digen.schedulers.rules import BatchRules, QueueConfig

NAMES = {
    "is_pipelined": ("gap", "enable"),
    "chunk_size": ("gap", "chunk_size"),
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


def changed(rules: BatchRules, **flat: Any) -> BatchRules:
    """A copy with other values; None is auto."""
    sections: dict[str, dict[str, Any]] = defaultdict(dict)
    for name in flat.keys() & NAMES.keys():
        section, field = NAMES[name]
        value = flat.pop(name)
        sections[section][field] = "auto" if value is None else value
    return replace(rules, **flat, **{name: replace(getattr(rules, name), **new) for name, new in sections.items()})


def make_rules(num_prompts: int, group_size: int, **flat: Any) -> BatchRules:
    """Strict rules that train what is ready, except for `flat`."""
    return changed(BatchRules(num_prompts, group_size, queue=QueueConfig(max_sample_refills=0)), **flat)
