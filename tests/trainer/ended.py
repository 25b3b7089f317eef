# SPDX-License-Identifier: Apache-2.0
"""The end of an actor, for certain."""

import pytest
import ray
from ray.exceptions import RayActorError


def kill(actor):
    """End an actor's process: `ray.kill` returns while it may still answer a call."""
    ray.kill(actor)
    assert_ends(actor)


def assert_ends(actor):
    """Wait until the actor has ended."""
    with pytest.raises(RayActorError):
        for _ in range(1000):
            ray.get(actor.__ray_ready__.remote(), timeout=60)
