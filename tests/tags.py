# SPDX-License-Identifier: Apache-2.0
"""A sample's tag, for tests that need a few of its facts."""

from dataclasses import fields, replace
from typing import Any

from verl_digen.types import Geometry, SampleFacts, SampleTag, Sampling

SAMPLING = Sampling(Geometry(16, 16), num_steps=10, true_cfg_scale=1.0, law="flow_grpo", noise_level=0.7)


FACTS = {field.name for field in fields(SampleFacts)}


def make_facts(uid: str = "p0", sample_index: int = 0, *, version: int = 0, **facts: Any) -> SampleFacts:
    """Facts of a sample of one trained step."""
    given = {"seed": 0, "last_version": version, "num_steps": 1, "sampling": SAMPLING, "condition_key": "a cat"}
    return SampleFacts(uid, sample_index, version=version, **given | facts)


def changed(holder: Any, **facts: Any) -> Any:
    """Copy of a tag, a trajectory or a fragment's sample with other facts."""
    return replace(holder, facts=replace(holder.facts, **facts))


def make_tag(reward: float = 0.0, **given: Any) -> SampleTag:
    """A sample of one trained step, generated and scored under one version."""
    facts = make_facts(**{name: given.pop(name) for name in FACTS & given.keys()})
    tag = {"parts": {}, "prompt": "a cat", "data_source": "test", "generated": (0.0, 1.0), "scored": (1.0, 2.0)}
    return SampleTag(facts, reward, **tag | given)
