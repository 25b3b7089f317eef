# SPDX-License-Identifier: Apache-2.0
"""Samples that train before their group is complete: when, and which ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl_digen.schedulers.durations import KnownDurations, MeasuredDurations
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.rules import BatchRules
from verl_digen.schedulers.simulation import PlannerRun
from verl_digen.schedulers.types import Commit, Fragment, Generate, Train, Wait

RULES = BatchRules(num_prompts=2, group_size=4, chunk_size=1, subgroups=True)


def durations(*, part_s: float, group_s: float = 4.0, sample_s: float = 3.0) -> KnownDurations:
    """Durations in which a part costs as much per sample as given."""
    return KnownDurations(
        sample_s={"a": sample_s, "b": sample_s},
        assisted_s=[1.0],
        scoring_s=0.5,
        fragment_s=[group_s, 2 * group_s],
        samples_s=[group_s / 4 * count for count in range(1, 9)],
        parts_s=[part_s * count for count in range(1, 5)],
    )


def begun(rules: BatchRules, known) -> BatchPlanner:
    """A planner whose two slots generate the first two samples of the first group since 0 s."""
    planner = BatchPlanner(rules, known, first_batch=0, num_batches=1)
    for slot in ("a", "b"):
        planner.on_slot_joined(slot, replica=slot, version=0)
    planner.on_prompts(0, ["p0", "p1"])
    assert [decision.chunk.samples for decision in planner.assign(0.0) if isinstance(decision, Generate)] == [
        (0,),
        (1,),
    ]
    return planner


def score(planner: BatchPlanner, chunk_id: int, sample: int, now_s: float) -> None:
    planner.on_generated(chunk_id, now_s)
    planner.assign(now_s)
    planner.on_scored(chunk_id, {sample: float(sample)}, 0, now_s + 0.5)


def test_scored_samples_of_the_oldest_group_train_at_a_bubble():
    planner = begun(RULES, durations(part_s=1.0))
    assert planner.next_for_trainer(0.0) == Wait("no_fragment_ready")
    score(planner, 0, 0, 3.0)
    score(planner, 1, 1, 3.0)
    assert planner.next_for_trainer(3.5) == Train(Fragment(0, 0, ("p0",), part=(0, 1)))
    planner.on_trained(0, 5.5)
    assert isinstance(planner.next_for_trainer(5.5), Wait)  # no sample trains twice


def test_a_ready_group_goes_first_and_only_what_is_left_of_a_group_is_counted():
    planner = begun(RULES, durations(part_s=1.0))
    score(planner, 0, 0, 3.0)
    assert planner.next_for_trainer(3.5) == Train(Fragment(0, 0, ("p0",), part=(0,)))
    planner.on_trained(0, 4.5)
    for chunk_id, now_s in ((1, 3.0), (2, 6.0), (3, 6.0), (4, 9.0)):
        score(planner, chunk_id, chunk_id % 4, now_s)
    # p1 has a scored sample, too
    assert planner.next_for_trainer(9.5) == Train(Fragment(1, 0, ("p0",), num_early=1))


@pytest.mark.parametrize(("part_s", "trains"), [(1.9, True), (2.1, False)])
def test_a_part_is_worth_its_call_if_half_of_it_is_saved(part_s, trains):
    planner = begun(RULES, durations(part_s=part_s, sample_s=30.0))
    score(planner, 0, 0, 30.0)
    assert isinstance(planner.next_for_trainer(30.5), Train) == trains


@pytest.mark.parametrize(("now_s", "trains"), [(3.5, True), (5.4, True), (5.6, False)])
def test_a_part_does_not_delay_a_group_that_is_nearly_complete_by_more_than_it_saves(now_s, trains):
    """The last samples are scored at 6.5 s. A sample saves 1 s and takes 1.9 s: it delays by 0.9 - (5.6 - now_s)."""
    planner = begun(RULES, durations(part_s=1.9))
    score(planner, 0, 0, 3.0)
    score(planner, 1, 1, 3.0)
    assert planner.next_for_trainer(3.5) == Train(Fragment(0, 0, ("p0",), part=(0, 1)))
    planner = begun(replace(RULES, num_prompts=2), durations(part_s=1.9))
    planner.on_generated(0, 3.0)
    planner.on_generated(1, 3.0)
    planner.assign(3.0)
    planner.on_scored(0, {0: 0.0}, 0, now_s)
    assert isinstance(planner.next_for_trainer(now_s), Train) == trains


def test_nothing_trains_early_without_the_switch_or_before_training_was_measured():
    for rules, known in ((replace(RULES, subgroups=False), durations(part_s=1.0)), (RULES, MeasuredDurations())):
        planner = begun(rules, known)
        score(planner, 0, 0, 3.0)
        assert isinstance(planner.next_for_trainer(3.5), Wait)


def test_the_group_after_a_dropped_one_may_train_early():
    planner = begun(replace(RULES, max_sample_refills=0), durations(part_s=1.0))
    score(planner, 0, 0, 3.0)
    assert planner.next_for_trainer(3.5) == Train(Fragment(0, 0, ("p0",), part=(0,)))
    planner.on_trained(0, 4.5)
    planner.on_generated(1, 4.5)
    planner.on_failed(1, [1])  # beyond the refills: p0 is dropped
    (first,) = (decision.chunk for decision in planner.assign(4.5) if isinstance(decision, Generate))
    assert (first.uid, first.samples) == ("p1", (0,))
    planner.on_generated(first.id, 8.0)
    planner.on_scored(first.id, {0: 1.0}, 0, 8.5)
    assert planner.next_for_trainer(8.5) == Train(Fragment(1, 0, ("p1",), part=(0,)))


def test_no_part_trains_before_the_sample_that_brings_the_conditions_is_there():
    planner = begun(RULES, durations(part_s=1.0, sample_s=30.0))
    score(planner, 1, 1, 30.0)
    assert isinstance(planner.next_for_trainer(30.5), Wait)
    score(planner, 0, 0, 31.0)
    assert planner.next_for_trainer(31.5) == Train(Fragment(0, 0, ("p0",), part=(0, 1)))


def test_a_part_is_measured_by_itself():
    measured = MeasuredDurations()
    assert measured.part_s(2, group_size=4) is None
    measured.on_trained(1, 8.0)
    assert measured.part_s(2, group_size=4) == 4.0
    measured.on_part_trained(2, 5.0)
    assert measured.part_s(2, group_size=4) == 5.0
    measured.on_trained(0.5, 4.0)
    assert measured.train_s() == (0.0, 8.0)


def test_a_simulated_step_is_shorter_where_generation_is_the_slower_part():
    """One slot generates a sample in 3 s, the trainer trains one in 1 s: only the last sample trains at the end."""

    def step_s(subgroups: bool) -> float:
        rules = BatchRules(num_prompts=2, group_size=4, chunk_size=1, subgroups=subgroups)
        run = PlannerRun(rules, durations(part_s=1.0), ["a"], num_batches=1, commit_s=0.25, keeps_events=True)
        run.play()
        assert run.reports[0].num_early == (6 if subgroups else 0)
        return run.commits_s[0]

    assert step_s(False) == 8 * 3.0 + 0.5 + 4.0 + 0.25
    assert step_s(True) == 8 * 3.0 + 0.5 + 1.0 + 0.25


def test_a_batch_with_parts_is_committed_with_its_counts():
    planner = BatchPlanner(replace(RULES, num_prompts=1), durations(part_s=1.0), first_batch=0, num_batches=1)
    planner.on_slot_joined("a", replica="a", version=0)
    planner.on_prompts(0, ["p0"])
    for chunk_id in range(4):
        planner.assign(3.0 * chunk_id)
        score(planner, chunk_id, chunk_id, 3.0 * (chunk_id + 1))
        decision = planner.next_for_trainer(3.0 * (chunk_id + 1) + 0.5)
        assert isinstance(decision, Train)
        planner.on_trained(decision.fragment.id, 3.0 * (chunk_id + 1) + 1.5)
    commit = planner.next_for_trainer(20.0)
    assert isinstance(commit, Commit)
    report = commit.report
    assert (report.num_groups, report.num_fragments, report.num_parts, report.num_early) == (1, 1, 3, 3)
