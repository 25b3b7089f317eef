# SPDX-License-Identifier: Apache-2.0
"""The planner's run with drawn durations and replicas that die, step by step by hand."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from verl_digen.schedulers.durations import KnownDurations
from verl_digen.schedulers.rules import BatchRules
from verl_digen.schedulers.simulation import PlannerRun
from verl_digen.simulate.variance import Failures, Ranks, SlowDevices, Variance
from verl_digen.simulate.varied_run import VariedRun

RULES = BatchRules(num_prompts=2, group_size=1)
SLOTS = {"a": 4.0, "b": 4.0}


@dataclass(frozen=True)
class Dying(Variance):
    """Replicas that die when the test says."""

    after_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(device, life) -> seconds it lives; the trainer is device 0."""

    def dies_after_s(self, device: int, life: int) -> float:
        return self.after_s.get((device, life), math.inf)


def durations(slow: float = 1.0) -> KnownDurations:
    return KnownDurations(dict(SLOTS), [5.0 * slow], 0.0, [1.0 * slow, 2.0 * slow])


def play(variance: Variance, *, num_batches: int = 3, rules: BatchRules = RULES, of_trainer=(1.0,)) -> VariedRun:
    by_slow = {slow: durations(slow) for slow in of_trainer}
    ranks = Ranks.of(variance, list(of_trainer))
    run = VariedRun(
        rules, by_slow, dict(SLOTS), variance, ranks, num_batches=num_batches, commit_s=1.0, keeps_events=True
    )
    run.play()
    return run


def test_without_variance_a_run_is_the_exact_one():
    exact = PlannerRun(RULES, durations(), list(SLOTS), num_batches=5, commit_s=1.0, keeps_events=True)
    exact.play()
    run = play(Variance(seed=4), num_batches=5)
    assert run.commits_s == exact.commits_s == [7.0, 14.0, 21.0, 28.0, 35.0]
    assert run.events == exact.events and run.busy_at_commit_s == exact.busy_at_commit_s
    assert run.generated_at_commit == [2.0, 4.0, 6.0, 8.0, 10.0]


def test_a_death_costs_the_sample_in_flight_and_the_slot_until_its_replacement_joins():
    """b dies at 3: a generates both samples until 8. The replacement is begun at 10, ready at 15, and joins at 20."""
    run = play(Dying(failures=Failures(0.0, replace_s=5.0), after_s={(2, 0): 3.0}))
    assert run.commits_s == [10.0, 20.0, 27.0] and run.deaths_s == [3.0]
    assert [report.num_reissued for report in run.reports] == [1, 0, 0]
    assert run.busy_s["generator"] == 6 * 4.0 + 3.0  # 3 s are lost work
    lost = [event for event in run.events if event.who == "b"]
    assert [(event.start_s, event.end_s) for event in lost] == [(0.0, 3.0), (20.0, 24.0)]
    assert run.generated_at_commit == [2.0, 4.0, 6.0]


def test_a_replacement_that_is_not_ready_waits_for_the_next_publication():
    run = play(Dying(failures=Failures(0.0, replace_s=10.5), after_s={(2, 0): 3.0}), num_batches=4)
    assert run.commits_s == [10.0, 20.0, 30.0, 37.0]


def test_a_replacement_dies_too_and_an_idle_replica_costs_its_slot_alone():
    """b dies idle at 5; its replacement is begun at 7, joins at 17 and dies at 18."""
    run = play(Dying(failures=Failures(0.0, replace_s=1.0), after_s={(2, 0): 5.0, (2, 1): 1.0}), num_batches=4)
    assert run.commits_s == [7.0, 17.0, 27.0, 37.0] and run.deaths_s == [5.0, 18.0]


def test_the_last_replica_must_not_die():
    with pytest.raises(ValueError, match=r"--failures must leave a replica alive.*none after 3 s.*lower it"):
        play(Dying(failures=Failures(0.0), after_s={(1, 0): 2.0, (2, 0): 3.0}))


def test_a_step_with_skew_alone_by_hand():
    variance = Variance(rank_skew=0.3, seed=8)
    run = play(variance, of_trainer=(1.0,) * 6, rules=replace(RULES, num_trainer_ranks=6))
    # both groups are ready at once and train in one call, of groups 0 and 1, then 2 and 3, then 4 and 5
    calls_s = [2.0 * variance.slowest(6, "train", first, 1.0) for first in (0, 2, 4)]
    expected, now_s = [], 0.0
    for call_s in calls_s:
        now_s += 4.0 + call_s + 1.0
        expected.append(now_s)
    assert run.commits_s == pytest.approx(expected, rel=1e-12)
    assert run.durations.fragment_s == pytest.approx([variance.mean_slowest(6), 2 * variance.mean_slowest(6)])


def test_jitter_is_drawn_for_each_sample_its_score_and_each_call():
    variance = Variance(jitter=0.3, seed=8)
    rules = BatchRules(num_prompts=1, group_size=2, chunk_size=2)
    by_slow = {1.0: replace(durations(), scoring_s=0.5)}
    ranks = Ranks.of(variance, [1.0])
    run = VariedRun(rules, by_slow, {"a": 4.0}, variance, ranks, num_batches=1, commit_s=1.0, keeps_events=False)
    run.play()
    generated_s = 4.0 * (variance.factor("generate", 0, 0) + variance.factor("generate", 0, 1))
    scored_s = 0.5 * max(variance.factor("score", 0, 0), variance.factor("score", 0, 1))
    assert run.commits_s == pytest.approx([generated_s + scored_s + variance.factor("train", 0) + 1.0], rel=1e-12)


def test_the_trainer_waits_for_its_slow_rank_and_an_assist_does():
    slow = Variance(slow=SlowDevices(1))
    run = play(slow, of_trainer=(1.0, 3.0), rules=replace(RULES, num_trainer_ranks=2))
    assert run.commits_s == [4.0 + 6.0 + 1.0, 22.0, 33.0]
    assert run.durations.fragment_s == [3.0, 6.0] and run.durations.assisted_s == [15.0]


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    variance = Variance(jitter=0.2, rank_skew=0.1, failures=Failures(20.0, replace_s=1.0), seed=3)
    first = play(variance, num_batches=6)
    assert play(variance, num_batches=6).events == first.events
    assert play(replace(variance, seed=4), num_batches=6).events != first.events
