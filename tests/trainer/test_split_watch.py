# SPDX-License-Identifier: Apache-2.0
"""Advice while a run goes on: when it is searched, and that each piece is told once."""

import logging

import pytest
from ray.exceptions import RayTaskError

from tests.observe.timeline_runs import simulated_run
from tests.trainer.test_split_advice import bad_run, h800
from verl_digen.observe.step_costs import rank_row_s, slot_sample_s, step_parts
from verl_digen.observe.timeline import Interval, Lane
from verl_digen.simulate.splits import placed_splits
from verl_digen.trainer.split_advice import Advice
from verl_digen.trainer.split_watch import FIRST_STEPS, MAX_STEPS, WARM_UP_STEPS, SplitWatch

SETTING, _ = bad_run()
FAMILY = placed_splits(SETTING.nodes, SETTING.limits)[0]


def advice_for(placed) -> Advice:
    return Advice(h800(4, 28), placed, measured_s=2.0, expected_s=1.0, num_steps=5)


class Searches:
    """Searches that end when told to, with what is next in `found`."""

    def __init__(self):
        self.begun, self.found, self.done = [], [], True

    def __call__(self, setting, steps):
        assert setting is SETTING
        self.begun.append(len(steps))
        return self

    def is_done(self):
        return self.done

    def result(self):
        found = self.found.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def step_intervals(step):
    trainer, slot, driver = Lane("trainer", 0, "h", 4), Lane("generator", 0, "h", 1), Lane("driver", 0, "h", 0)
    work = {"group_ids": (f"p{step}",), "num_samples": 2}
    begin = 10.0 * step
    return [
        Interval("generate", slot, step, begin, begin + 4, chunk_id=step, **work),
        Interval("train", trainer, step, begin + 4, begin + 8, fragment_id=step, **work),
        Interval("commit", trainer, step, begin + 8, begin + 8.5),
        Interval("step", driver, step, begin, begin + 9),
    ]


@pytest.fixture
def searches():
    return Searches()


@pytest.fixture
def watch(searches):
    return SplitWatch(SETTING, saves=True, begin=searches)


def observe(watch, first, last):
    return [line for step in range(first, last + 1) if (line := watch.observe(step_intervals(step), step)) is not None]


def test_the_first_search_is_after_the_warm_up_and_later_ones_after_twice_as_many_steps(watch, searches):
    searches.found = [None] * 9
    last = WARM_UP_STEPS + FIRST_STEPS
    assert observe(watch, 1, last - 1) == [] and searches.begun == []
    observe(watch, last, last)
    assert searches.begun == [FIRST_STEPS]
    observe(watch, last + 1, 200)
    assert searches.begun == [5, 10, 20, MAX_STEPS, MAX_STEPS, MAX_STEPS]  # after 5, 10, 20, 40, 80 and 160


def test_advice_is_told_once_and_again_if_it_changes(watch, searches):
    one, other = advice_for(FAMILY[0]), advice_for(FAMILY[1])
    searches.found = [one, one, None, other, other, None]
    lines = observe(watch, 1, 200)
    assert len(lines) == 2
    assert str(FAMILY[0].split.generator) in lines[0] and str(FAMILY[1].split.generator) in lines[1]


def test_a_search_that_goes_on_is_not_waited_for_and_no_second_one_begins(watch, searches):
    searches.done = False
    searches.found = [advice_for(FAMILY[0])]
    assert observe(watch, 1, 100) == [] and searches.begun == [FIRST_STEPS]
    searches.done = True
    assert len(observe(watch, 101, 101)) == 1


def test_a_search_that_fails_is_a_warning_and_the_next_one_goes_on(watch, searches, caplog):
    searches.found = [RayTaskError("advise", "traceback", ValueError("no")), advice_for(FAMILY[0]), None, None]
    with caplog.at_level(logging.WARNING):
        lines = observe(watch, 1, 60)
    assert len(lines) == 1 and "the search of a faster split failed" in caplog.text


def test_a_step_without_work_does_not_count(watch, searches):
    driver = Lane("driver", 0, "h", 0)
    for step in range(1, 50):
        assert watch.observe([Interval("step", driver, step, 0.0, 1.0)], step) is None
    assert searches.begun == []


def test_parts_of_a_step_are_those_of_its_timeline():
    parts = step_parts(step_intervals(3), 3)
    assert (parts.step_s, parts.commit_s) == (9.0, 0.5)
    assert parts.chunks == [(2, 4.0)] and parts.fragments == [(2, 4.0)]
    assert slot_sample_s(parts.chunks) == 2.0
    assert rank_row_s(parts.fragments, 4, 9) == pytest.approx(4.0 / 5)  # 18 rows, 5 on the fullest of 4 ranks
    saved = [*step_intervals(3), Interval("save", Lane("trainer", 0, "h", 4), 3, 38.0, 39.0)]
    assert step_parts(saved, 3).step_s == 8.0


def test_every_step_of_a_run_with_early_chunks_has_its_parts():
    intervals, _ = simulated_run(num_steps=4)
    for step in (2, 3, 4):
        parts = step_parts(intervals, step)
        assert sum(number for number, _ in parts.chunks) == sum(number for number, _ in parts.fragments) == 8 * 24
