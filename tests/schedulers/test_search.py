# SPDX-License-Identifier: Apache-2.0
"""The search against an independent exhaustive search, event by event."""

import random
import statistics
from dataclasses import replace

import pytest

from tests.schedulers.flat import make_rules
from tests.schedulers.workload import Costs, Workload, simulate
from verl_digen.schedulers.batch import ChunkRequest
from verl_digen.schedulers.bubbles import MAX_STREAM, bubble_at, bundles
from verl_digen.schedulers.durations import KnownDurations
from verl_digen.schedulers.group_book import GroupBook
from verl_digen.schedulers.play import Bubble
from verl_digen.schedulers.search import decide

NUM_INSTANCES = 600
SAME_S = 1e-6


def shortest_makespan(workload: Workload, costs: Costs) -> float:
    """Minimum makespan over all choices of a trainer that trains a ready fragment first.

    At every event, if it is free and nothing is ready, it may wait for the next event or generate the next chunk.
    """
    known: dict[tuple, float] = {}
    generate_s, assist_s, score_s, train_s = costs.generate_s, costs.assist_s, costs.score_s, costs.train_s

    def rounded(times):
        return tuple(round(value, 7) for value in times)

    def shortest(now_s: float, num_left: int, slots: tuple[float, ...], ready: tuple[float, ...]) -> float:
        if num_left == 0 and not slots and not ready:
            return now_s
        key = (round(now_s, 7), num_left, rounded(slots), rounded(ready))
        if key in known:
            return known[key]
        busy, done, left = list(slots), list(ready), num_left
        while busy and busy[0] <= now_s + 1e-9:
            end_s = busy.pop(0)
            done.append(end_s + score_s)
            if left:
                left -= 1
                busy = sorted([*busy, end_s + generate_s])
        done.sort()
        if done and done[0] <= now_s + 1e-9:
            value = shortest(now_s + train_s, left, tuple(busy), tuple(done[1:]))
        else:
            value = shortest(min([*busy[:1], *done[:1]]), left, tuple(busy), tuple(done))
            if left:
                end_s = now_s + assist_s
                value = min(value, shortest(end_s, left - 1, tuple(busy), tuple(sorted([*done, end_s + score_s]))))
        known[key] = value
        return value

    num_busy = min(workload.num_fragments, workload.num_slots)
    num_left = workload.num_fragments - num_busy
    return shortest(0.0, num_left, (generate_s,) * num_busy, ()) + costs.commit_s


def instances(seed: int, count: int):
    """Small instances: assisting from 20 times faster to 5 times slower than generating, scoring and training from
    almost zero to several chunks long; half of them with durations that never coincide."""
    rng = random.Random(seed)
    for _ in range(count):
        workload = Workload(num_fragments=rng.randint(1, 10), num_slots=rng.randint(1, 4))
        assist_s = rng.choice([0.05, 0.2, 0.5, 0.8, 1, 1.2, 1.5, 2, 3, 5])
        score_s = rng.choice([0, 0.01, 0.1, 0.5, 1, 3])
        train_s = rng.choice([0.001, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 2])
        if rng.random() < 0.5:
            assist_s, score_s, train_s = (value * rng.uniform(0.8, 1.2) for value in (assist_s, score_s, train_s))
        yield workload, Costs(generate_s=1.0, assist_s=assist_s, score_s=score_s, train_s=train_s, commit_s=0.3)


@pytest.fixture(scope="module")
def outcomes():
    """(workload, costs, shortest makespan, makespan with TAG, without TAG) per instance."""
    return [
        (
            workload,
            costs,
            shortest_makespan(workload, costs),
            simulate(workload, costs, {"gap", "tag"}).makespan_s,
            simulate(workload, costs, {"gap"}).makespan_s,
        )
        for workload, costs in instances(seed=7, count=NUM_INSTANCES)
    ]


def test_search_is_within_half_a_percent_of_exhaustive_on_average_and_two_at_worst(outcomes):
    excess = [found / shortest - 1 for _, _, shortest, found, _ in outcomes]
    assert min(excess) > -SAME_S, "shorter than exhaustive: one of the two is wrong"
    assert statistics.mean(excess) < 0.005
    assert max(excess) < 0.02


def test_assisting_is_never_worse_than_not_and_often_better(outcomes):
    assert all(found <= without + SAME_S for _, _, _, found, without in outcomes)
    better = [without / found for _, _, _, found, without in outcomes if found < without - SAME_S]
    assert len(better) > NUM_INSTANCES / 4
    assert max(better) > 1.3


ASKED = Bubble(
    free_in_s=(100.0,),
    sample_s=(100.0,),
    unissued=(4, 4, 4),
    ready_in_s=(0.0, 0.0, 0.0),
    chunk_size=1,
    assist_sizes=(6,),
    assist_call_s=0.5,
    assist_round_s=2.0,
    score_s=0.25,
    train_call_s=0.0,
    train_group_s=1.0,
    max_groups=1,
    num_ranks=6,
)
"""Three groups of four samples on a slot that is hopelessly slow, and a trainer of six ranks."""


def bubble(num_fragments: int, num_slots: int, *, assist_s: float, train_s: float) -> Bubble:
    """The first bubble of a batch of one-sample groups."""
    num_left = num_fragments - num_slots
    return replace(
        ASKED,
        free_in_s=(1.0,) * num_slots,
        sample_s=(1.0,) * num_slots,
        unissued=(0,) * num_slots + (1,) * num_left,
        ready_in_s=(1.1,) * num_slots + (0.0,) * num_left,
        assist_sizes=(1,),
        assist_call_s=0.0,
        assist_round_s=assist_s,
        score_s=0.1,
        train_group_s=train_s,
        num_ranks=1,
    )


def test_a_verdict_never_promises_more_than_waiting_costs():
    for assist_s in (0.1, 0.5, 1.0, 2.0, 10.0):
        for train_s in (0.01, 0.1, 0.5, 2.0):
            verdict = decide(bubble(24, 4, assist_s=assist_s, train_s=train_s))
            assert verdict.gain_s >= 0
            assert (verdict.num_samples > 0) <= (verdict.gain_s > 0)
            assert verdict.wait_until_s == pytest.approx(1.1)


def random_bubble(rng: random.Random) -> Bubble:
    """A bubble with groups of several samples, some of them begun, on slots of different speed."""
    num_slots, num_groups, group_size = rng.randint(1, 4), rng.randint(2, 8), rng.choice([1, 2, 3, 4, 6])
    num_left = [rng.randint(0, group_size), *[group_size] * (num_groups - 1)]
    return Bubble(
        free_in_s=tuple(rng.uniform(0, 1) for _ in range(num_slots)),
        sample_s=tuple(rng.uniform(0.5, 1.5) for _ in range(num_slots)),
        unissued=tuple(num_left),
        ready_in_s=tuple(0.0 if count == group_size else rng.uniform(0.5, 2) for count in num_left),
        chunk_size=rng.choice([1, 2]),
        assist_sizes=rng.choice([(1,), (2,), (3, 6), (1, 2, 4)]),
        assist_call_s=rng.choice([0.0, 0.3]),
        assist_round_s=rng.uniform(0.1, 2),
        num_ranks=rng.choice([1, 2, 3]),
        spans_groups=rng.random() < 0.7,
        score_s=rng.choice([0.0, 0.1, 1.0]),
        train_call_s=rng.choice([0.0, 0.3]),
        train_group_s=group_size / num_slots * rng.uniform(0.05, 1),
        max_groups=rng.choice([1, 4]),
    )


def test_branching_finds_plans_that_the_heuristics_miss(monkeypatch):
    rng = random.Random(0)
    gains = []
    for _ in range(300):
        asked = random_bubble(rng)
        searched = decide(asked)
        with monkeypatch.context() as patched:
            patched.setattr("verl_digen.schedulers.search.MAX_WORK", 0)
            heuristic = decide.__wrapped__(asked)
        assert searched.makespan_s <= heuristic.makespan_s + SAME_S <= heuristic.waiting_s + 2 * SAME_S
        gains.append(heuristic.makespan_s / searched.makespan_s - 1)
    assert max(gains) > 0.03
    assert sum(gain > 0.001 for gain in gains) >= 10


def test_without_slots_the_trainer_generates_itself():
    alone = replace(ASKED, free_in_s=(), sample_s=(), unissued=(2, 2), ready_in_s=(0.0, 0.0), assist_sizes=(2,))
    alone = replace(alone, assist_call_s=0.0, assist_round_s=1.0, num_ranks=1)
    alone = replace(alone, score_s=0.5, train_call_s=0.1, train_group_s=0.2, max_groups=2)
    verdict = decide(alone)
    assert verdict.num_samples == 2
    # two chunks of 2 s; the first group trains at 4.0, the second at 4.5, when it is scored
    assert verdict.makespan_s == pytest.approx(4.5 + 0.1 + 0.2)
    assert verdict.wait_until_s == float("inf")


def test_a_slots_chunk_never_spans_two_groups_and_a_group_is_ready_with_its_last_chunk():
    # one slot, two groups of three samples in chunks of two: 2 + 1 + 2 + 1 samples, ready at 3.5 and 6.5
    asked = replace(ASKED, free_in_s=(0.0,), sample_s=(1.0,), unissued=(3, 3), ready_in_s=(0.0, 0.0), chunk_size=2)
    asked = replace(asked, assist_sizes=(2,), assist_round_s=100.0, num_ranks=1, score_s=0.5, max_groups=4)
    verdict = decide(asked)
    assert (verdict.num_samples, verdict.wait_until_s) == (0, pytest.approx(3.5))
    assert verdict.makespan_s == pytest.approx(6.5 + 1.0)


def test_an_assist_takes_samples_of_as_many_groups_as_it_has_ranks_for():
    # 6 + 6 samples, 2.5 s each: group 0 trains at 2.75, after the second assist, which began at 2.5
    verdict = decide(ASKED)
    assert verdict.num_samples == 6
    assert verdict.makespan_s == pytest.approx(2 * 2.5 + 0.25 + 3 * 1.0 - 0.25)
    # one group each time: two assists of 4 samples, two groups trained, the third assist
    alone = decide(replace(ASKED, spans_groups=False))
    assert alone.makespan_s == pytest.approx(2 * 2.5 + 2 * 1.0 + 2.5 + 0.25 + 1.0)


def test_each_call_that_trains_has_its_fixed_part():
    # two assists of 2.5 s, and a call for each of three groups: the first is ready before the second assist has ended
    verdict = decide(replace(ASKED, train_call_s=0.5))
    assert verdict.num_samples == 6 and verdict.makespan_s == pytest.approx(2 * 2.5 + 3 * 1.5)


def test_an_overdue_slot_is_free_now_and_groups_beyond_the_batch_are_left_out():
    rules = make_rules(2, 2, extra_prompts=1)
    book = GroupBook(rules)
    book.add(0, ["p0", "p1", "p2"])
    trained, begun = (book.issue(book.groups[uid], 0, 2) for uid in ("p0", "p1"))
    book.accept(trained.id, {0: 0.0, 1: 1.0})
    book.complete(book.groups["p0"])
    book.take_ready(book.batches[0], 1)
    asked = bubble_at(
        9.0,
        batch=book.batches[0],
        slots=["a", "b"],
        requests=[ChunkRequest(begun, "a", since_s=0.0)],
        live=book.live,
        durations=KnownDurations({"a": 2.0, "b": 2.0}, [1.0], 0.5, [1.0]),
        rules=rules,
    )
    assert asked is not None and asked.free_in_s == (0.0, 0.0)
    assert (asked.unissued, asked.ready_in_s) == ((0,), (0.5,)), "p1 alone; 2 x 2 s after 0 were long ago"


def test_the_number_of_rounds_is_the_one_that_ends_first():
    # one call of two rounds saves a fixed part of 2 s; two calls would train the first group meanwhile
    long_call = replace(ASKED, assist_sizes=(6, 12), assist_call_s=2.0)
    verdict = decide(long_call)
    assert verdict.num_samples == 12
    assert verdict.makespan_s == pytest.approx(2.0 + 2 * 2.0 + 0.25 + 3.0)
    # without a fixed part smaller assists overlap scoring with generation
    assert decide(replace(long_call, assist_call_s=0.0)).num_samples == 6


@pytest.mark.parametrize("chunk_size", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_bundles_of_slots_predict_what_single_slots_do(size, chunk_size):
    """Eleven slots that end their chunks at different times, 20 groups of 4 samples, an assisting trainer."""
    slots = [(0.1 * (index * 7 % 11), 1.0 + 0.01 * index) for index in range(11)]
    whole = replace(
        ASKED,
        free_in_s=tuple(free for free, _ in slots),
        sample_s=tuple(seconds for _, seconds in slots),
        unissued=(4,) * 20,
        ready_in_s=(0.0,) * 20,
        chunk_size=chunk_size,
        assist_sizes=(8,),
        assist_call_s=0.0,
        assist_round_s=1.1,
        score_s=0.5,
        train_group_s=0.2,
        max_groups=4,
        num_ranks=8,
    )
    free_s, sample_s = bundles(slots, size)
    assert len(free_s) == 11 // size and sum(size / seconds for seconds in sample_s) == pytest.approx(
        sum(1 / seconds for _, seconds in slots)
    )
    coarse = replace(whole, free_in_s=tuple(free_s), sample_s=tuple(sample_s), bundle=size)
    exact, found = decide(whole), decide(coarse)
    assert found.waiting_s == pytest.approx(exact.waiting_s, rel=0.08)
    assert found.makespan_s == pytest.approx(exact.makespan_s, rel=0.08)
    assert found.num_samples and exact.num_samples


def test_a_large_batch_is_decided_with_few_chunks():
    """704 ranks and 320 slots, 352 groups of 24 samples: the first bubble of a batch."""
    slots = {f"s{index:03d}": 13.0 for index in range(320)}
    rules = make_rules(352, 24, assist="bts", num_trainer_ranks=704, max_chunk_size=1)
    book = GroupBook(rules)
    book.add(0, [f"p{index}" for index in range(352)])
    asked = bubble_at(
        0.0,
        batch=book.batches[0],
        slots=slots,
        requests=[],
        live={},
        durations=KnownDurations(slots, [14.0], 2.0, [0.5 * count for count in range(1, 9)]),
        rules=rules,
    )
    assert asked is not None and len(asked.unissued) == 352 and sum(asked.unissued) == 352 * 24
    assert len(asked.free_in_s) * asked.bundle <= 320 and sum(asked.unissued) / asked.bundle <= MAX_STREAM
    verdict = decide(asked)
    assert verdict.num_samples == 704 and verdict.gain_s > 1
