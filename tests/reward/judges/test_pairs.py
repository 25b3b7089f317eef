# SPDX-License-Identifier: Apache-2.0
"""Pairs of a group, and win rates."""

import random
from collections import Counter

import pytest

from verl_digen.reward.scorers.win_rate import pairs_of, win_rates


@pytest.mark.parametrize("num_samples", [2, 3, 4, 9, 24])
@pytest.mark.parametrize("rounds", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("seed", range(5))
def test_everybody_has_equally_many_opponents_and_meets_nobody_twice(num_samples, rounds, seed):
    pairs = pairs_of(num_samples, rounds, random.Random(seed))
    met = Counter(frozenset(pair) for pair in pairs)
    assert set(met.values()) == {1} and all(len(pair) == 2 for pair in met)
    opponents = Counter(sample for pair in pairs for sample in pair)
    is_full = rounds == 0 or 2 * rounds >= num_samples - 1
    assert opponents == dict.fromkeys(range(num_samples), num_samples - 1 if is_full else 2 * rounds)


def test_the_same_seed_gives_the_same_pairs_and_another_one_others():
    pairs = [pairs_of(24, 2, random.Random(seed)) for seed in ("1/a", "1/a", "1/b")]
    assert pairs[0] == pairs[1] != pairs[2]


def test_both_orders_occur():
    pairs = pairs_of(24, 0, random.Random(0))
    assert 0.4 < sum(first < second for first, second in pairs) / len(pairs) < 0.6


def test_a_win_rate_is_the_mean_over_the_comparisons():
    outcomes = {(0, 1): 1.0, (1, 0): 0.5, (2, 0): 0.25, (1, 2): 0.0}
    assert win_rates(3, outcomes) == pytest.approx([(1 + 0.5 + 0.75) / 3, (0 + 0.5 + 0) / 3, (0.25 + 1) / 2])


def test_a_sample_without_a_comparison_is_an_error():
    with pytest.raises(RuntimeError, match="every sample must be compared"):
        win_rates(3, {(0, 1): 1.0})
