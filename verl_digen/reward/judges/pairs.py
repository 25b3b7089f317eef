# SPDX-License-Identifier: Apache-2.0
"""Comparisons within a group: which samples meet, and what the outcomes make of each sample. Pure.

All pairs, or R rounds: the samples stand in a circle in random order, and each meets its R next neighbours on either
side. So everybody has 2R opponents, and a group of G costs G R comparisons in place of G (G - 1) / 2.

Invariants (tests/reward/judges/test_pairs.py): no pair twice, nobody against itself, equally many opponents for all.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import combinations

Pair = tuple[int, int]
"""Positions of two samples of a group, in the order in which the judge sees them."""


def pairs_of(num_samples: int, rounds: int, rng: random.Random) -> list[Pair]:
    """Pairs that meet, each in a random order.

    Args:
        rounds: R; 0, or so many that everybody would meet everybody, gives all pairs.

    Example:
        pairs_of(3, 0, random.Random(0))  # (0, 1), (0, 2), (1, 2), some of them turned around
    """
    if rounds == 0 or 2 * rounds >= num_samples - 1:
        found = list(combinations(range(num_samples), 2))
    else:
        circle = rng.sample(range(num_samples), num_samples)
        found = [
            (circle[place], circle[(place + step) % num_samples])
            for place in range(num_samples)
            for step in range(1, rounds + 1)
        ]
    return [(first, second) if rng.random() < 0.5 else (second, first) for first, second in found]


def win_rates(num_samples: int, outcomes: Mapping[Pair, float]) -> list[float]:
    """Mean outcome of each sample over its comparisons.

    Args:
        outcomes: pair -> probability that its first sample is better, 0 to 1.

    Raises:
        RuntimeError: a sample has no comparison.
    """
    won: list[list[float]] = [[] for _ in range(num_samples)]
    for (first, second), outcome in outcomes.items():
        won[first].append(outcome)
        won[second].append(1.0 - outcome)
    if not all(won):
        raise RuntimeError(f"every sample must be compared, got {outcomes!r} for {num_samples} samples")
    return [sum(outcome) / len(outcome) for outcome in won]
