# SPDX-License-Identifier: Apache-2.0
"""A sample's tag, for tests that need a few of its facts."""

from typing import Any

from verl_digen.types import Geometry, SampleTag, Sampling

SAMPLING = Sampling(Geometry(16, 16), num_steps=10, true_cfg_scale=1.0, law="flow_grpo", noise_level=0.7)


def make_tag(reward: float = 0.0, *, version: int = 0, **facts: Any) -> SampleTag:
    """A sample of one trained step, generated and scored under one version."""
    given: dict[str, Any] = {
        "parts": {},
        "prompt": "a cat",
        "data_source": "test",
        "seed": 0,
        "last_version": version,
        "num_steps": 1,
        "experts": (),
        "generated": (0.0, 1.0),
        "scored": (1.0, 2.0),
        "sampling": SAMPLING,
        "condition_key": "a cat",
    }
    return SampleTag(reward=reward, version=version, **given | facts)
