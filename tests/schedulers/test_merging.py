# SPDX-License-Identifier: Apache-2.0
"""Waiting for a larger fragment: against every way to cut the groups, and in whole simulated runs."""

import random
from itertools import combinations

import pytest

from tests.schedulers.flat import changed, make_rules
from verl_digen.schedulers.durations import KnownDurations
from verl_digen.schedulers.merging import LATE, Merge, Merging, best_merge
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.simulation import PlannerRun
from verl_digen.schedulers.types import Train, Wait


def earliest_end(ready_s, call_s, group_s, max_groups, first_sizes):
    """(end, size of the first fragment), over every way to cut the groups into fragments in their order."""
    num, best = len(ready_s), (float("inf"), 0)
    for num_cuts in range(num):
        for cuts in combinations(range(1, num), num_cuts):
            ends = [*cuts, num]
            sizes = [end - start for start, end in zip([0, *cuts], ends, strict=True)]
            if max(sizes) > max_groups or sizes[0] not in first_sizes:
                continue
            now_s = 0.0
            for end, size in zip(ends, sizes, strict=True):
                now_s = max(now_s, ready_s[end - 1]) + call_s + size * group_s
            best = min(best, (now_s, sizes[0]))
    return best


@pytest.mark.parametrize("seed", range(200))
def test_the_earliest_end_is_that_of_the_best_of_all_ways_to_cut_the_groups(seed):
    rng = random.Random(seed)
    num, max_groups = rng.randint(2, 9), rng.randint(1, 5)
    num_ready = rng.randint(1, num)
    ready_s = [0.0] * num_ready + sorted(rng.uniform(0.01, 5) for _ in range(num - num_ready))
    call_s, group_s = rng.uniform(0, 2), rng.uniform(0.1, 1)
    merge = best_merge(ready_s, call_s, group_s, max_groups)
    if num_ready >= min(max_groups, num):
        assert merge is None
        return
    now_s, _ = earliest_end(ready_s, call_s, group_s, max_groups, {num_ready})
    later_s, size = earliest_end(ready_s, call_s, group_s, max_groups, set(range(num_ready + 1, max_groups + 1)))
    if merge is None:
        assert now_s - later_s <= LATE * ready_s[size - 1] + 1e-6
    else:
        assert merge.gain_s == pytest.approx(now_s - later_s) and merge.wait_s in ready_s[num_ready:]
        assert merge.gain_s > LATE * merge.wait_s


def test_a_call_without_a_fixed_part_never_waits():
    assert best_merge([0.0, 0.001, 0.002], 0.0, 1.0, 8) is None
    assert best_merge([0.0, 0.001, 0.002], 0.5, 1.0, 8) == Merge(0.002, pytest.approx(0.498)), "0.5 saved, 0.002 lost"


def test_a_predicted_moment_is_waited_for_once():
    merging, asked = Merging(), []

    def find():
        asked.append(1)
        return Merge(wait_s=2.0, gain_s=1.0)

    assert merging.wait_s(10.0, 1, find) == 2.0
    assert merging.wait_s(11.5, 1, find) == 0.5, "an event of another kind"
    assert merging.wait_s(12.0, 1, find) is None and len(asked) == 1, "late: train"
    merging.forget()
    assert merging.wait_s(12.0, 1, find) == 2.0
    assert merging.wait_s(12.5, 2, find) == 2.0 and len(asked) == 3, "another group is ready: predicted anew"


def planner_with_a_ready_group(num_prompts=3, **changes):
    """Groups of one sample, one ready, two of them in 0.5 and 1 s; a call takes 3 s, and 1 s per group."""
    durations = KnownDurations({"a": 1.0, "b": 1.5}, [1.0], 0.0, [4.0, 5.0, 6.0])
    rules = changed(make_rules(num_prompts, 1, merges=True), **changes)
    planner = BatchPlanner(rules, durations, first_batch=0, num_batches=1)
    for slot in ("a", "b"):
        planner.on_slot_joined(slot, replica=slot, version=0)
    planner.on_prompts(0, [f"p{number}" for number in range(num_prompts)])
    first, _ = planner.assign(0.0)
    planner.on_generated(first.chunk.id, 1.0)
    planner.assign(1.0)
    planner.on_scored(first.chunk.id, {0: 0.5}, 0, 1.0)
    return planner


def test_the_trainer_waits_for_groups_that_are_nearly_there_and_trains_if_they_are_late():
    planner = planner_with_a_ready_group()
    assert planner.next_for_trainer(1.0) == Wait("merging_pays", 1.0)
    assert planner.next_for_trainer(1.5) == Wait("merging_pays", 0.5)
    decision = planner.next_for_trainer(2.0)
    assert isinstance(decision, Train) and decision.fragment.uids == ("p0",)


@pytest.mark.parametrize(
    "changes", [{"merges": False}, {"assist": "bts", "num_prompts": 4}, {"max_groups_per_fragment": 1}]
)
def test_a_ready_group_trains_at_once_where_waiting_is_off_or_an_assist_may_fill_the_time(changes):
    assert isinstance(planner_with_a_ready_group(**changes).next_for_trainer(1.0), Train)


def test_the_trainer_waits_where_no_sample_is_left_for_an_assist():
    assert planner_with_a_ready_group(assist="bts").next_for_trainer(1.0) == Wait("merging_pays", 1.0)


@pytest.mark.parametrize("seed", range(40))
def test_waiting_never_makes_a_strict_batch_longer(seed):
    rng = random.Random(seed)
    slots = [f"s{number}" for number in range(rng.randint(1, 8))]
    group_size, group_s = rng.randint(1, 6), rng.uniform(0.1, 2.0)
    call_s = group_s * rng.uniform(0, 4)
    fragments = [call_s + group_s * count for count in range(1, 9)]
    durations = KnownDurations(dict.fromkeys(slots, 1.0), [1.0] * group_size, rng.choice([0.0, 0.2]), fragments)
    rules = make_rules(rng.randint(2, 12), group_size)
    ends = []
    for merges in (False, True):
        run = PlannerRun(changed(rules, merges=merges), durations, slots, 3, 0.1, keeps_events=False)
        run.play()
        ends.append(run.commits_s[-1])
    assert ends[1] <= ends[0] + 1e-6


def test_two_groups_train_in_one_call_where_that_saves_a_fixed_part():
    durations = KnownDurations({"a": 1.0, "b": 1.0}, [1.0], 0.0, [2.0 + 0.1 * count for count in range(1, 9)])
    ends = []
    for merges in (False, True):
        run = PlannerRun(make_rules(2, 2, merges=merges), durations, ["a", "b"], 1, 0.0, keeps_events=False)
        run.play()
        ends.append(run.commits_s[-1])
    assert ends == pytest.approx([1.0 + 2 * 2.1, 2.0 + 2.2])
