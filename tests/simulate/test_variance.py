# SPDX-License-Identifier: Apache-2.0
"""Draws of a run's variance, the slowest rank of a call, and what failures cost, each against a slow reference."""

import math
from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import NormalDist, fmean, stdev

import pytest

from verl_digen.simulate.phases import Phases
from verl_digen.simulate.profile import load_profile
from verl_digen.simulate.variance import Failures, Ranks, SlowDevices, Variance, largest, lognormal

NUMBERS = replace(load_profile("qwen-image-20b").numbers, num_prompts=2, group_size=3, score_s=1.0)


def test_without_variance_every_factor_is_one_and_nothing_dies():
    variance = Variance(seed=3)
    assert variance.factor("generate", 1, 2) == variance.slowest(1000, "train", 1) == variance.mean_slowest(9) == 1.0
    assert variance.slow_factors(5) == [1.0] * 5 and variance.dies_after_s(0, 0) == math.inf
    assert variance.is_constant and not Variance(jitter=0.1).is_constant and not Variance(rank_skew=0.1).is_constant


def test_draws_are_functions_of_the_seed_and_the_name():
    variance = Variance(jitter=0.2, seed=5)
    assert variance.factor("score", 3, 1) == Variance(jitter=0.2, seed=5).factor("score", 3, 1)
    others = [
        variance.factor("score", 3, 2),
        variance.factor("generate", 3, 1),
        replace(variance, seed=6).factor("score", 3, 1),
    ]
    assert len({variance.factor("score", 3, 1), *others}) == 4


def test_jitter_has_mean_one_and_the_given_deviation():
    drawn = [Variance(jitter=0.3).factor("generate", group, 0) for group in range(20_000)]
    assert fmean(drawn) == pytest.approx(1.0, abs=0.01) and stdev(drawn) == pytest.approx(0.3, abs=0.01)


def test_the_slowest_rank_is_the_largest_of_as_many_draws():
    variance, num_ranks = Variance(rank_skew=0.5, seed=1), 7
    factor, quantile = variance.slowest(num_ranks, "train", 4), variance.uniform("train", 4, "skew")
    # P(all ranks are faster) = P(one is faster) ** 7
    sigma = math.sqrt(math.log(1.25))
    assert NormalDist().cdf((math.log(factor) + sigma**2 / 2) / sigma) ** num_ranks == pytest.approx(quantile)
    rng = Random(0)
    reference = fmean(max(lognormal(rng.random(), 0.5) for _ in range(num_ranks)) for _ in range(20_000))
    assert variance.mean_slowest(num_ranks) == pytest.approx(reference, rel=0.01)
    assert fmean(variance.slowest(num_ranks, group) for group in range(20_000)) == pytest.approx(reference, rel=0.01)


def test_a_call_never_gets_faster_with_more_ranks():
    variance = Variance(rank_skew=0.1)
    for call in range(50):
        assert all(few < more for few, more in pairwise(variance.slowest(ranks, call) for ranks in (1, 2, 8, 64, 1024)))
    assert largest(1 - 2**-53, 10**9, 0.1) < 3  # no draw is infinite


def test_a_call_waits_for_its_slow_ranks_by_hand():
    ranks = Ranks.of(Variance(), [1.0, 2.0, 1.0])
    assert ranks.counts == ((1.0, 2), (2.0, 1))
    assert ranks.call_s(lambda slow: 3.0 * slow, "train", 0) == ranks.expected_s(lambda slow: 3.0 * slow) == 6.0
    assert ranks.call_s(lambda slow: max(5.0, 2.0 * slow), "train", 0) == 5.0  # weights arrive later than it computes
    skewed = Variance(rank_skew=0.2, seed=2)
    expected_s = max(3.0 * skewed.slowest(2, "train", 0, 1.0), 6.0 * skewed.slowest(1, "train", 0, 2.0))
    assert Ranks.of(skewed, [1.0, 2.0, 1.0]).call_s(lambda slow: 3.0 * slow, "train", 0) == expected_s
    jittered = replace(skewed, jitter=0.1)
    call_s = Ranks.of(jittered, [1.0, 2.0, 1.0]).call_s(lambda slow: 3.0 * slow, "train", 0)
    assert call_s == expected_s * jittered.factor("train", 0)


def test_slow_devices_are_as_many_as_asked_for_rounded_up():
    assert [SlowDevices(1, 32).number(number) for number in (32, 256, 1000, 1024)] == [1, 8, 32, 32]
    factors = Variance(slow=SlowDevices(3, factor=4.0), seed=1).slow_factors(10)
    assert sorted(factors) == [1.0] * 7 + [4.0] * 3
    assert factors != Variance(slow=SlowDevices(3, factor=4.0), seed=2).slow_factors(10)
    placed = Variance(slow=SlowDevices(2, place="generator"), seed=1)
    assert placed.slow_factors(5, is_separate=True) == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert placed.slow_factors(50) == replace(placed, slow=SlowDevices(2)).slow_factors(50)
    with pytest.raises(ValueError, match="--slow-devices must be <= 2, all devices, got 3; give fewer"):
        SlowDevices(3).number(2)


def test_dealt_samples_wait_for_the_slow_device_and_a_queue_gives_it_fewer():
    slow = Phases(Variance(slow=SlowDevices(1), seed=1), NUMBERS, 2)
    assert slow.slow_factors == [1.0, 2.0]
    # six samples of 4 s: three each, of which the slow device takes 8 s each; from a queue it takes two
    assert slow.generate(0, 4.0) == (24.0, 1.0, 18.0)
    assert slow.generate(0, 4.0, has_queue=True) == (16.0, 1.0, 16.0)
    assert slow.shared_s(9.0, "reward", 0) == 6.0  # one and a half devices


def test_a_colocated_phase_ends_with_its_slowest_device():
    variance = Variance(jitter=0.4, seed=9)
    phases = Phases(variance, NUMBERS, 4)
    own_s = [0.0] * 4
    scored_s = []
    for index in range(6):
        name = (2 * 5 + index // 3, index % 3)  # step 5 begins with group 10
        own_s[index % 4] += 2.0 * variance.factor("generate", *name)
        scored_s.append(own_s[index % 4] + variance.factor("score", *name))
    generated = phases.generate(5, 2.0)
    assert generated.generate_s == pytest.approx(max(own_s))
    assert generated.generate_s + generated.score_s == pytest.approx(max(scored_s))
    assert generated.busy_s == pytest.approx(sum(own_s) / 4)


def test_stops_cost_what_a_run_played_stop_by_stop_takes():
    failures, step_s, num_devices = Failures(0.02, restart_s=900.0, save_freq=10), 60.0, 50
    rng, now_s, num_segments = Random(1), 0.0, 20_000
    for _ in range(num_segments):
        while (after_s := rng.expovariate(0.02 * num_devices / 3600)) < 10 * step_s:
            now_s += after_s + 900.0  # the steps since the checkpoint are lost
        now_s += 10 * step_s
    assert failures.stopped_step_s(step_s, num_devices) == pytest.approx(now_s / num_segments / 10, rel=0.01)


def test_a_rare_stop_costs_half_the_way_to_a_checkpoint_a_restart_and_the_refill():
    failures, step_s = Failures(1e-6, restart_s=900.0, save_freq=10), 60.0
    per_step = 1e-6 / 3600 * 8 * step_s
    lost_s = (failures.stopped_step_s(step_s, 8, refill_s=50.0) - step_s) / per_step
    assert lost_s == pytest.approx(10 * step_s / 2 + 900.0 + 50.0, rel=1e-4)
    assert Failures(0.0).stopped_step_s(step_s, 8) == step_s


def test_replicas_die_at_the_given_rate():
    variance = Variance(failures=Failures(0.5))
    assert fmean(variance.dies_after_s(device, 0) for device in range(20_000)) == pytest.approx(7200.0, rel=0.02)
    assert variance.dies_after_s(3, 0) != variance.dies_after_s(3, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Variance(jitter=-0.1), r"--jitter must lie in \[0, 10\].*got -0.1; 0.1 is 10 %"),
        (lambda: Variance(rank_skew=math.nan), r"--rank-skew must lie in \[0, 10\].*got nan"),
        (lambda: SlowDevices(0), "--slow-devices must be >= 1 device, got 0"),
        (lambda: SlowDevices(3, 2), "--slow-devices must be at most all devices.*got '3/2'"),
        (lambda: SlowDevices(1, factor=0.5), "factor of --slow-devices must be >= 1.*got 0.5"),
        (lambda: Failures(-1.0), "--failures must be >= 0 and finite, got -1.0"),
        (lambda: Failures(1.0, replace_s=math.inf), "--replace-s must be >= 0 and finite, got inf"),
        (lambda: Failures(1.0, restart_s=-1.0), "--restart-s must be >= 0 and finite, got -1.0"),
        (lambda: Failures(1.0, save_freq=0), "--save-freq must be >= 1 step, got 0"),
        (lambda: Failures(100.0).stopped_step_s(60.0, 32), "--failures must leave a run that gets on.*lower it"),
    ],
)
def test_bad_settings_are_refused_by_the_option_as_typed(make, message):
    with pytest.raises(ValueError, match=message):
        make()
