# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from verl_digen.schedulers.durations import NEWEST_WEIGHT, KnownDurations, MeasuredDurations


def test_nothing_is_known_before_it_was_measured():
    durations = MeasuredDurations()
    assert durations.generate_sample_s("a") is None
    assert durations.assist_s() is None
    assert durations.score_s() is None
    assert durations.train_s() is None


def test_constant_durations_are_learnt_exactly():
    durations = MeasuredDurations()
    for count in range(1, 50):
        durations.on_generated("a", num_samples=count % 4 + 1, seconds=0.7 * (count % 4 + 1))
        durations.on_assisted(num_rounds=3, seconds=2.4)
        durations.on_scored(0.25)
        durations.on_trained(num_groups=2, seconds=1.5)
        assert durations.generate_sample_s("a") == pytest.approx(0.7)
        assert durations.assist_s() == pytest.approx((0.0, 0.8))
        assert durations.score_s() == pytest.approx(0.25)
        assert durations.train_s() == pytest.approx((0.0, 0.75))


def test_fixed_and_proportional_parts_of_training_are_told_apart_by_fragments_of_two_sizes():
    durations = MeasuredDurations()
    rng = random.Random(1)
    for _ in range(30):
        num_groups = rng.randint(1, 4)
        durations.on_trained(num_groups, 0.4 + 0.3 * num_groups)
    assert durations.train_s() == pytest.approx((0.4, 0.3))


def test_training_that_gets_cheaper_with_size_by_chance_is_taken_as_proportional():
    durations = MeasuredDurations()
    for num_groups, seconds in ((1, 2.0), (1, 2.0), (3, 1.0)):  # the first one is forgotten
        durations.on_trained(num_groups, seconds)
    assert durations.train_s() == pytest.approx((0.0, 1.5 / 2))


def test_an_assist_that_takes_the_same_time_for_any_number_of_rounds_is_learnt_as_such():
    durations = MeasuredDurations()
    for num_rounds in (4, 4, 1, 4):
        durations.on_assisted(num_rounds, 5.0)
    assert durations.assist_s() == pytest.approx((5.0, 0.0))


def test_given_durations_of_calls_are_a_line_through_the_smallest_and_the_largest():
    given = KnownDurations({"a": 1.0}, [4.0], 0.0, [1.0, 1.7, 2.0])
    assert given.train_s() == pytest.approx((0.5, 0.5)) and given.assist_s() == pytest.approx((0.0, 4.0))


def test_slots_differ_and_an_unmeasured_one_is_taken_for_average():
    durations = MeasuredDurations()
    durations.on_generated("slow", 1, 3.0)
    durations.on_generated("slow", 1, 3.0)
    durations.on_generated("fast", 1, 1.0)
    assert durations.generate_sample_s("slow") == 3.0
    assert durations.generate_sample_s("fast") == 1.0
    assert durations.generate_sample_s("new") == pytest.approx(2.0)


def test_a_cold_start_is_forgotten_with_the_second_measure():
    durations = MeasuredDurations()
    durations.on_generated("a", 24, 6.8)
    durations.on_trained(1, 1.0)
    assert durations.generate_sample_s("a") == pytest.approx(6.8 / 24), "better than nothing"
    for _ in range(3):
        durations.on_generated("a", 24, 0.9)
        durations.on_trained(1, 0.5)
    assert durations.generate_sample_s("a") == pytest.approx(0.9 / 24)
    assert durations.train_s() == pytest.approx((0.0, 0.5))


def test_a_change_of_speed_is_learnt():
    durations = MeasuredDurations()
    for _ in range(100):
        durations.on_scored(1.0)
    for _ in range(5):
        durations.on_scored(2.0)
    assert durations.score_s() == pytest.approx(2.0 - (1 - NEWEST_WEIGHT) ** 5)
