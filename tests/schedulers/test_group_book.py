# SPDX-License-Identifier: Apache-2.0
"""The book of groups: its example, its bounds, and its invariants under random calls. Groups are begun early if
there is time for them, and no others."""

import random

import pytest

from tests.schedulers.flat import make_rules
from verl_digen.schedulers.durations import KnownDurations, MeasuredDurations
from verl_digen.schedulers.group_book import GroupBook, Headstart
from verl_digen.schedulers.rules import BatchRules
from verl_digen.schedulers.simulation import PlannerRun
from verl_digen.schedulers.types import Chunk


def assert_invariants(book: GroupBook, rules: BatchRules) -> None:
    live: dict[str, list[int]] = {}
    for chunk_id, owed in book.live.items():
        group = book.groups[owed.chunk.uid]
        assert owed.chunk.id == chunk_id and chunk_id in group.chunks
        assert owed.left and owed.left <= set(owed.chunk.samples)
        assert owed.chunk.version == group.version
        live.setdefault(group.uid, []).extend(owed.left)
    for group in book.groups.values():
        assert group.chunks <= set(book.live)
        if group.state == "open":
            samples = [*group.unissued, *live.get(group.uid, []), *group.rewards]
            assert sorted(samples) == list(range(rules.group_size)), "a sample is in two states, or in none"
            assert group.version is not None or len(group.unissued) == rules.group_size
        else:
            assert not group.unissued and not group.chunks and group.uid not in live
    for batch in book.batches.values():
        assert batch.num_open == sum(group.state == "open" for group in batch.groups)
        assert batch.num_open + batch.num_complete + sum(batch.dropped.values()) == len(batch.groups)
        assert batch.num_complete <= rules.num_prompts
        for age, count in batch.begun.items():
            bound = [group for group in batch.groups if group.state != "dropped" and group.version is not None]
            assert count == sum(batch.number - group.version == age for group in bound)


def random_rules(rng: random.Random) -> BatchRules:
    return make_rules(
        num_prompts=rng.randint(1, 4),
        group_size=rng.randint(1, 5),
        extra_prompts=rng.choice([0, 2]),
        drop_zero_spread=rng.random() < 0.5,
        max_versions=rng.choice([0, 1, 2]),
        max_group_refills=rng.choice([0, 3]),
        max_sample_refills=rng.choice([0, 2, 20]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_invariants_hold_after_random_calls(seed):
    rng = random.Random(seed)
    rules = random_rules(rng)
    book, version, num_uids = GroupBook(rules), 0, 0
    for _ in range(300):
        number = rng.randint(version, version + rules.staleness.max_versions)
        call = rng.choice(["add", "issue", "issue", "accept", "accept", "fail", "give back", "next version", "train"])
        chunk_id = rng.choice(list(book.live)) if book.live else None
        if call == "add" and book.num_wanted(number):
            uids = [f"p{num_uids + index}" for index in range(book.num_wanted(number))]
            num_uids += len(uids)
            book.add(number, uids)
        elif call == "issue":
            group = book.next_group(version, may_begin=rng.random() < 0.8)
            if group is not None:
                left = len(group.unissued)
                chunk = book.issue(group, version, size := rng.randint(1, 4))
                assert len(chunk.samples) == min(left, size) and chunk.version == version
        elif chunk_id is not None and call in ("accept", "fail", "give back"):
            owed = book.live[chunk_id]
            some = {index for index in owed.left if rng.random() < 0.7} or set(owed.left)
            group = book.groups[owed.chunk.uid]
            if call == "accept":
                late = {index: 0.0 for index in range(rules.group_size) if index not in owed.left}
                assert book.accept(chunk_id, {**dict.fromkeys(some, rng.choice([0.0, 1.0])), **late}) == some
                if len(group.rewards) == rules.group_size:
                    void = book.complete(group)
                    assert not set(void) & set(book.live)
            elif call == "fail":
                void = book.fail(chunk_id, some)
                assert not void or group.state == "dropped"
            else:
                book.give_back(chunk_id, some)
        elif call == "next version" and rules.staleness.max_versions and rng.random() < 0.1:
            for old in book.begun_versions:
                void = book.restart(old)
                assert not set(void) & set(book.live)
            version += rng.choice([0, 1])
            for old in [number for number in book.batches if number < version]:  # the trainer has no use for them
                for group in book.batches[old].groups:
                    if group.state == "open":
                        book.drop(group, "failed")
                book.close(old)
        elif call == "train" and number in book.batches and book.batches[number].ready:
            batch = book.batches[number]
            size = rng.randint(1, len(batch.ready))
            expected = [group.uid for group in batch.groups if group.state == "ready"][:size]
            uids = book.take_ready(batch, size)
            assert list(uids) == expected
            book.mark_trained(batch, uids)
        assert_invariants(book, rules)


def test_the_example_of_the_docstring():
    book = GroupBook(make_rules(1, 2, max_sample_refills=1))
    book.add(0, ["p0"])
    with pytest.raises(RuntimeError, match="a uid names one group, got 'p0' again"):
        book.add(0, ["p0"])
    group = book.next_group(0, may_begin=True)
    assert group is not None and group.unissued == [0, 1]
    assert book.issue(group, 0, size=2) == Chunk(0, 0, "p0", (0, 1), version=0)
    assert book.fail(0, {1}) == []
    assert book.accept(0, {0: 0.1}) == {0}
    assert book.issue(group, 0, size=2) == Chunk(1, 0, "p0", (1,), version=0)
    assert book.accept(1, {1: 0.9}) == {1}
    assert book.complete(group) == []
    assert book.take_ready(book.batches[0], 1) == ("p0",)
    book.mark_trained(book.batches[0], ["p0"])
    book.close(0)
    assert not book.groups and not book.batches and not book.live


def test_a_restart_counts_the_samples_that_had_been_issued():
    book = GroupBook(make_rules(1, 3, max_versions=1))
    book.add(0, ["p0"])
    chunk = book.issue(book.groups["p0"], 0, size=2)
    assert book.restart(0) == [chunk.id] and book.groups["p0"].unissued == [0, 1, 2]
    assert book.batches[0].counts.num_reissued == 2


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
    run = PlannerRun(rules, durations, slots, num_batches=12, commit_s=0.1)
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
