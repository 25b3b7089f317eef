# SPDX-License-Identifier: Apache-2.0
import random
from dataclasses import fields, replace

import pytest

from verl_digen.config import RewardConfig
from verl_digen.processes.deadlines import Bound, Deadlines, DeadlinesConfig

FACTOR = "digen.deadlines.factor"
CONFIG = DeadlinesConfig(factor=5.0, first_s=3600.0, answer_s=120.0, train_s=900.0)
SCORE_S = 1200.0


def test_the_first_call_of_every_caller_has_time_to_compile():
    deadlines = Deadlines(CONFIG, SCORE_S)
    first = Bound(3600.0, "digen.deadlines.first_s")
    assert deadlines.bound("generate", "a", size=4) == first
    deadlines.observe("generate", "a", size=4, seconds=1.0)
    assert deadlines.bound("generate", "b", size=4) == first
    assert deadlines.bound("train", "a") == first


def test_later_calls_are_bounded_by_what_was_measured_and_never_below_the_floor():
    deadlines = Deadlines(CONFIG, SCORE_S)
    deadlines.observe("generate", "a", size=4, seconds=80.0)
    assert deadlines.bound("generate", "a", size=8) == Bound(800.0, "digen.deadlines.factor")
    assert deadlines.bound("generate", "a", size=1) == Bound(120.0, "digen.deadlines.answer_s")


def test_calls_that_take_no_work_have_their_floor_from_the_start():
    assert Deadlines(CONFIG, SCORE_S).bound("answer", "a") == Bound(120.0, "digen.deadlines.answer_s")


def test_scores_have_the_time_of_all_tries_of_a_sample_and_of_one_more_in_a_queue():
    config = RewardConfig(timeout_s=900.0, max_retries=3)
    assert Deadlines(CONFIG, config.score_s).bound("score", "rewards") == Bound(4500.0, "digen.reward.timeout_s")


def test_a_floor_above_first_s_counts_for_the_first_call_too():
    deadlines = Deadlines(replace(CONFIG, first_s=10.0), SCORE_S)
    assert deadlines.bound("train", "trainer") == Bound(900.0, "digen.deadlines.train_s")


def test_a_score_that_waits_for_its_group_has_the_time_of_a_sample_that_is_generated_by_a_hung_replica_first():
    deadlines, alone = Deadlines(CONFIG, SCORE_S, scores_groups=True), Deadlines(CONFIG, SCORE_S)
    assert deadlines.bound("score", "rewards") == Bound(7200.0, "digen.deadlines.first_s")
    for one in (deadlines, alone):
        one.observe("score", "rewards", size=4, seconds=400.0)
        one.observe("generate", "a", size=4, seconds=1000.0)
    assert alone.bound("score", "rewards", size=4) == Bound(2000.0, FACTOR)
    assert deadlines.bound("score", "rewards", size=4) == Bound(2000.0 + 5000.0, FACTOR)
    few = deadlines.bound("score", "rewards", size=1)
    assert few == Bound(SCORE_S + 3600.0, "digen.reward.timeout_s"), "a replica that joins is a first one"
    assert deadlines.bound("generate", "a", size=4) == alone.bound("generate", "a", size=4) == Bound(5000.0, FACTOR)


@pytest.mark.parametrize("seed", range(20))
def test_no_call_that_takes_up_to_the_factor_is_overdue(seed):
    rng = random.Random(seed)
    fixed_s, item_s = rng.uniform(0, 100), rng.uniform(1, 100)
    deadlines = Deadlines(CONFIG, SCORE_S)
    for _ in range(30):
        size = rng.randint(1, 8)
        predicted_s = deadlines.predicted_s("generate", size)
        assert deadlines.bound("generate", "a", size=size).seconds >= CONFIG.factor * 0.999 * predicted_s
        deadlines.observe("generate", "a", size=size, seconds=fixed_s + item_s * size)
    for size in range(1, 9):
        assert deadlines.bound("generate", "a", size=size).seconds >= 4.9 * (fixed_s + item_s * size)


@pytest.mark.parametrize("name", [field.name for field in fields(DeadlinesConfig)])
def test_every_bound_is_finite_and_positive(name):
    with pytest.raises(ValueError, match=rf"digen\.deadlines\.{name} must be"):
        replace(CONFIG, **{name: 0.0})
    with pytest.raises(ValueError, match=rf"digen\.deadlines\.{name} must be"):
        replace(CONFIG, **{name: float("inf")})
