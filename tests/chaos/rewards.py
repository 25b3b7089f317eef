# SPDX-License-Identifier: Apache-2.0
"""The reward of a sample, a known function of its seed: a wrong one is detected, and groups of equal rewards exist."""

from __future__ import annotations

NUM_REWARDS = 3


def reward_of(seed: int) -> float:
    """The reward of the sample whose noise has `seed`, or whose first pixel, the seed's lowest byte, is `seed`."""
    return float(seed % 256 % NUM_REWARDS)
