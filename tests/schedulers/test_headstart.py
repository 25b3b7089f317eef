# SPDX-License-Identifier: Apache-2.0
"""Groups that are begun early: those for which there is time, and no others."""

import random

import pytest

from tests.schedulers.flat import make_rules
from verl_digen.schedulers.durations import KnownDurations, MeasuredDurations
from verl_digen.schedulers.group_book import Headstart
from verl_digen.schedulers.simulation import PlannerRun


def durations_of(sample_s):
    """Slots and durations: groups train for 2 s."""
    durations = MeasuredDurations()
    durations.on_trained(3, 6.0)
    slots = [f"s{number}" for number in range(len(sample_s))]
    for slot, seconds in zip(slots, sample_s, strict=True):
        durations.on_generated(slot, 2, 2 * seconds)
    return slots, durations


def headstart_of(sample_s, *, last_s, spent_s=0.0, assists=True):
    headstart = Headstart(num_groups=2)
    headstart.on_worked(last_s, *durations_of(sample_s), assists=assists)
    headstart.on_next_batch()
    headstart.on_worked(spent_s, *durations_of(sample_s))
    return headstart


def most_samples(headstart, *, num_ahead=1):
    fitting = [count for count in range(1, 1001) if headstart.has_time_for(count, num_ahead=num_ahead)]
    assert fitting == list(range(1, len(fitting) + 1))
    return len(fitting)


@pytest.mark.parametrize(
    ("sample_s", "spent_s", "num_ahead", "most"),
    [
        ([2.0], 0.0, 1, 4),  # 8 s: no longer than a batch
        ([2.0], 7.0, 1, 3),  # 1 s of this batch, 8 - 2 s of the next
        ([2.0], 20.0, 1, 3),  # this batch takes longer than the last one
        ([2.0], 5.0, 0, 0),  # of the batch that the trainer is at: 3 - 2 s
        ([2.0], 8.0, 2, 4),
        ([2.0, 1.0], 7.0, 1, 10),
        ([10.0] * 99, 0.0, 1, 0),  # one sample alone takes longer
        ([0.0, 2.0], 5.0, 1, 1000),
    ],
)
def test_the_samples_must_end_before_the_trainer_would_have_generated_them(sample_s, spent_s, num_ahead, most):
    headstart = headstart_of(sample_s, last_s=8.0, spent_s=spent_s)
    assert most_samples(headstart, num_ahead=num_ahead) == most


def test_a_trainer_that_does_not_assist_leaves_all_groups_to_the_slots():
    headstart = headstart_of([2.0], last_s=8.0, assists=False)
    assert most_samples(headstart) == 1000
    headstart.on_worked(1.0, *durations_of([2.0]), assists=True)
    assert most_samples(headstart) == 4, "it does now"
    headstart.on_next_batch()
    headstart.on_worked(1.0, *durations_of([2.0]))
    assert most_samples(headstart) == 0, "it did; that batch was 1 s"
    headstart.on_next_batch()
    assert most_samples(headstart) == 1000


def test_of_the_first_batch_the_training_is_known():
    headstart = Headstart(num_groups=2)
    assert most_samples(headstart) == 1000
    headstart.on_worked(1.0, *durations_of([1.0]), assists=True)
    assert most_samples(headstart) == 4, "two groups of 2 s"


def played(max_versions, *, num_slots, sample_s, group_size, train_s, assist_s, num_groups=4):
    slots = [f"s{number}" for number in range(num_slots)]
    counts = range(1, num_groups + 1)
    assisted_s, fragment_s = ([seconds * count for count in counts] for seconds in (assist_s, train_s))
    durations = KnownDurations(dict.fromkeys(slots, sample_s), assisted_s, 0.1, fragment_s)
    rules = make_rules(
        num_prompts=num_groups,
        group_size=group_size,
        chunk_size=1,
        max_groups_per_fragment=num_groups,
        assist="bts",
        num_trainer_ranks=group_size,
        max_versions=max_versions,
    )
    run = PlannerRun(rules, durations, slots, num_batches=12, commit_s=0.1, keeps_events=False)
    run.play()
    return run.commits_s, run.reports


ONE_SLOW_SLOT = {"num_slots": 1, "sample_s": 10.0, "group_size": 8, "train_s": 6.0, "assist_s": 8.0}
"""A group takes 80 s on the slot, and a batch 49 s of the trainer."""


def test_a_group_that_takes_longer_than_a_step_is_left_to_the_trainer():
    strict_s, _ = played(0, **ONE_SLOW_SLOT)
    early_s, reports = played(1, **ONE_SLOW_SLOT)
    assert sum(report.stale_groups.get(1, 0) for report in reports[2:]) == 0
    assert early_s[-1] - early_s[1] <= strict_s[-1] - strict_s[1] + 1e-6


def test_beginning_groups_early_makes_no_run_longer():
    rng = random.Random(5)
    ratios = []
    for _ in range(100):
        case = {
            "num_slots": rng.choice([1, 1, 2, 4, 8]),
            "sample_s": rng.choice([1.0, 3.0, 10.0, 20.0]),
            "group_size": rng.choice([2, 4, 8]),
            "train_s": rng.choice([1.0, 3.0, 6.0]),
            "assist_s": rng.choice([1.0, 4.0, 8.0]),
        }
        strict_s, early_s = (played(versions, **case)[0] for versions in (0, 1))
        ratios.append((early_s[-1] - early_s[1]) / (strict_s[-1] - strict_s[1]))
    assert max(ratios) < 1.01 and min(ratios) < 0.8
