# SPDX-License-Identifier: Apache-2.0
"""Comparison of two trainers by the change of the weights, not by the weights.

Weights hardly move in a few steps, so those of an untrained network would pass for those of any training. Changes d and
d' agree if ||d - d'|| <= TOLERANCE ||d|| and ||d|| > 0.
"""

import math
from collections.abc import Mapping

from torch import Tensor

Weights = Mapping[str, Tensor]

TOLERANCE = 1e-3
"""Larger than the effect of summation order in a few steps of SGD, smaller than any sample's share of the gradient."""

SGD = (
    # plain steps: the change is the sum of the gradients times the rate, so it knows their signs and their sizes
    "actor_rollout_ref.actor.optim.optimizer=SGD",
    "actor_rollout_ref.actor.optim.override_optimizer_config={momentum: 0.9}",
    "actor_rollout_ref.actor.optim.lr=0.5",
    "actor_rollout_ref.actor.optim.weight_decay=0.0",
    "actor_rollout_ref.actor.optim.clip_grad=1e9",
)
"""Overrides of a run whose weights are compared. Momentum is state that a resume has to bring back."""


def relative_gap(start: Weights, expected: Weights, got: Weights) -> float:
    """||d - d'|| / ||d|| of the changes d = expected - start and d' = got - start, over all tensors; inf if d is 0."""
    assert start.keys() == expected.keys() == got.keys()
    moved = _distance(expected, start)
    return _distance(got, expected) / moved if moved else math.inf


def assert_same_change(start: Weights, expected: Weights, got: Weights, *, unequal: Mapping[str, Weights]) -> None:
    """Assert that `got` has the change from `start` that `expected` has, and that the comparison can fail.

    Args:
        unequal: weights from other trainings, by name; each must fail the same comparison.
    """
    gap = relative_gap(start, expected, got)
    assert gap <= TOLERANCE, f"the changes differ by {gap:.1e} of their size, {_distance(expected, start):.1e}"
    for name, weights in unequal.items():
        other = relative_gap(start, expected, weights)
        assert other > 10 * TOLERANCE, f"{name} would pass: its change differs by {other:.1e} only"


def _distance(one: Weights, other: Weights) -> float:
    return math.sqrt(sum((one[name].double() - other[name].double()).square().sum().item() for name in one))
