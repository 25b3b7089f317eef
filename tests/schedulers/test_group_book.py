# SPDX-License-Identifier: Apache-2.0
"""The book of groups: its example, its bounds, and its invariants under random calls."""

import random

import pytest

from verl_digen.schedulers.group_book import GroupBook
from verl_digen.schedulers.rules import BatchRules
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
    return BatchRules(
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
        number = rng.randint(version, version + rules.max_versions)
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
        elif call == "next version" and rules.max_versions and rng.random() < 0.1:
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
    book = GroupBook(BatchRules(1, 2, max_sample_refills=1))
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


def begun_book(rules: BatchRules, uids: list[str]) -> GroupBook:
    """A book whose groups are all in flight, a chunk each, ids from 0."""
    book = GroupBook(rules)
    book.add(0, uids)
    for uid in uids:
        book.issue(book.groups[uid], 0, size=rules.group_size)
    return book


def test_one_failure_more_than_allowed_drops_the_group_and_voids_its_chunks():
    book = begun_book(BatchRules(1, 2, max_sample_refills=1), ["p0"])
    assert book.fail(0, {0}) == []
    again = book.issue(book.groups["p0"], 0, size=1)
    assert book.fail(again.id, {0}) == [0, 1]
    assert book.groups["p0"].state == "dropped" and not book.live
    assert book.batches[0].dropped == {"failed": 1} and book.batches[0].num_sample_refills == 1


def test_the_group_that_fills_the_batch_makes_the_others_surplus():
    book = begun_book(BatchRules(1, 2, extra_prompts=2), ["p0", "p1", "p2"])
    book.accept(1, {0: 0.1, 1: 0.9})
    assert book.complete(book.groups["p1"]) == [0, 2]
    assert [group.state for group in book.groups.values()] == ["dropped", "ready", "dropped"]


def test_a_restarted_group_has_all_its_samples_again_and_none_of_its_rewards():
    book = begun_book(BatchRules(1, 3, max_versions=1), ["p0"])
    book.accept(0, {0: 0.5})
    book.give_back(0, {1})
    assert book.restart(0) == [0]
    group = book.next_group(0, may_begin=True)
    assert group is not None and (group.version, group.unissued, group.rewards) == (None, [0, 1, 2], {})
    assert book.batches[0].num_reissued == 2 and book.begun_versions == []


def test_a_reward_that_is_not_finite_is_an_error_and_changes_nothing():
    book = begun_book(BatchRules(1, 2), ["p0"])
    with pytest.raises(RuntimeError, match="a reward must be finite, got nan for sample 1 of group p0"):
        book.accept(0, {0: 0.1, 1: float("nan")})
    assert book.groups["p0"].rewards == {} and book.live[0].left == {0, 1}


def test_a_uid_names_one_group():
    book = begun_book(BatchRules(2, 2), ["p0"])
    with pytest.raises(RuntimeError, match="a uid names one group, got 'p0' again"):
        book.add(0, ["p0"])
