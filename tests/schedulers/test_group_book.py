# SPDX-License-Identifier: Apache-2.0
"""The book of groups: its example, its bounds, and its invariants under random calls."""

import random

import pytest

from tests.schedulers.flat import make_rules
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
