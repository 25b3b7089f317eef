# SPDX-License-Identifier: Apache-2.0
"""The conductor against pools made of events: no Ray, no clock but a counter."""

import asyncio
import itertools
import random
from collections import Counter

import pytest

from verl_digen.agent_loop.chunks import GeneratedChunk, ScoredChunk
from verl_digen.errors import RunStopped
from verl_digen.observe.timeline import Lane, Recorder
from verl_digen.schedulers.durations import MeasuredDurations
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.rules import BatchRules
from verl_digen.trainer.conductor import Conductor, Lanes

GROUP_SIZE = 4


class Pools:
    """Generator and trainer whose answers come when the test, or a seeded order, says so."""

    def __init__(self, rng=None, fail=(), lose_slot_at=None, fail_accumulate_at=None):
        self.rng, self.fail, self.lose_slot_at, self.fail_accumulate_at = (
            rng,
            set(fail),
            lose_slot_at,
            fail_accumulate_at,
        )
        self.generated, self.assisted, self.trained, self.calls = [], [], [], []
        self.is_open = False
        self.version = self.staged = 0
        self.slot_versions = {}
        self.withdrawn = set()
        self.hangs_until_withdrawn = set()

    async def _pause(self):
        for _ in range(self.rng.randint(0, 6) if self.rng else 1):
            await asyncio.sleep(0)

    async def generate(self, slot, chunk):
        self.calls.append(("generate", slot, chunk.uid, chunk.samples))
        await self._pause()
        if self.lose_slot_at is not None and len(self.generated) >= self.lose_slot_at and slot == "s1":
            self.lose_slot_at = None
            self.slot_versions.pop(slot, None)
            return GeneratedChunk(dict.fromkeys(chunk.samples, "died"), is_slot_lost=True)
        assert chunk.version == self.slot_versions.get(slot, 0), "the slot has the weights that the chunk is for"
        made = await self._make(chunk)
        assert chunk.version == self.slot_versions.get(slot, 0), "weights change between two chunks only"
        return made

    async def _make(self, chunk):
        await self._pause()
        while chunk.uid in self.hangs_until_withdrawn and chunk.id not in self.withdrawn:
            await asyncio.sleep(0)
        if chunk.id in self.withdrawn:
            self.done = getattr(self, "done", {}) | {chunk.id: []}
            return GeneratedChunk(dict.fromkeys(chunk.samples, "withdrawn"), is_slot_lost=False)
        failed = {index for index in chunk.samples if (chunk.uid, index) in self.fail}
        self.fail -= {(chunk.uid, index) for index in failed}
        self.generated += [(chunk.uid, index) for index in chunk.samples if index not in failed]
        self.done = getattr(self, "done", {}) | {chunk.id: [index for index in chunk.samples if index not in failed]}
        return GeneratedChunk(dict.fromkeys(failed, "no luck"), is_slot_lost=False)

    async def cancel(self, chunk):
        self.calls.append(("cancel", chunk.uid))
        self.withdrawn.add(chunk.id)

    async def assist(self, chunk):
        self.calls.append(("assist", chunk.uid, chunk.samples))
        assert self.is_open
        self.assisted += [(chunk.uid, index) for index in chunk.samples]
        return await self._make(chunk)

    async def load(self, slots):
        self.calls.append(("load", tuple(slots)))
        await self._pause()
        self.slot_versions |= dict.fromkeys(slots, self.staged)
        return self.staged

    async def collect(self, chunk):
        await self._pause()
        tags = {
            index: {"reward": float(index), "min_global_steps": chunk.version, "max_global_steps": chunk.version}
            for index in self.done[chunk.id]
        }
        self.num_scored = getattr(self, "num_scored", Counter()) + Counter({chunk.uid: len(tags)})
        if self.num_scored[chunk.uid] == GROUP_SIZE:
            self.calls.append(("scored whole", chunk.uid))
        return ScoredChunk(tags, {})

    async def begin(self):
        assert not self.is_open
        self.is_open = True
        self.calls.append(("begin",))

    async def accumulate(self, fragment, groups):
        assert self.is_open
        self.calls.append(("accumulate", fragment.uids))
        await self._pause()
        if self.fail_accumulate_at is not None and len(self.trained) >= self.fail_accumulate_at:
            raise FloatingPointError("a kernel failed")
        for uid in fragment.uids:
            assert sorted(groups[uid]) == list(range(GROUP_SIZE)), "whole groups only"
        self.trained += fragment.uids

    async def commit(self):
        assert self.is_open
        self.is_open = False
        self.version += 1
        self.calls.append(("commit",))
        return {"grad_norm": 1.0}

    async def abort(self):
        self.is_open = False
        self.calls.append(("abort",))


def make_conductor(pools, num_prompts=3, slots=("s0", "s1"), **rules):
    clock = itertools.count()
    recorder = Recorder(now_s=lambda: float(next(clock)))
    planner = BatchPlanner(
        BatchRules(num_prompts, GROUP_SIZE, **{"max_group_refills": 2, "max_sample_refills": 3, **rules}),
        MeasuredDurations(),
        first_batch=0,
        num_batches=None,
    )
    lanes = {slot: Lane("generator", number, "here", 1) for number, slot in enumerate(slots)}
    for slot in slots:
        planner.on_slot_joined(slot, replica=slot, version=0)
    numbers = itertools.count()
    return Conductor(
        planner,
        pools,
        pools,
        lambda batch, count: [f"p{next(numbers):03d}" for _ in range(count)],
        slots_of={slot: [slot] for slot in slots},
        recorder=recorder,
        lanes=Lanes(Lane("trainer", 0, "here", 1), Lane("reward", 0, "here", 0), lanes),
    )


def run(conductor, num_batches=1, between=0, drains=False):
    async def batches():
        outcomes = []
        for number in range(num_batches):
            outcomes.append(await conductor.run_batch())
            for _ in range(between):  # verl's loop saves, logs and moves weights
                await asyncio.sleep(0)
            conductor.generator.staged = number + 1
            await conductor.publish(number + 1)
            if drains:
                await conductor.drain()
        return outcomes

    return asyncio.run(batches())


def test_the_first_group_trains_while_later_ones_are_generated():
    pools = Pools()
    run(make_conductor(pools, num_prompts=8))
    order = [call[0] for call in pools.calls]
    first_training = order.index("accumulate")
    assert "generate" in order[first_training:], "generation went on"
    assert pools.calls[first_training][1] == ("p000",)
    assert "begin" in order[:2] and [name for name in order if name != "load"][-1] == "commit"


def test_a_barrier_trains_the_whole_batch_in_one_call():
    pools = Pools()
    run(make_conductor(pools, is_pipelined=False))
    assert [call[1] for call in pools.calls if call[0] == "accumulate"] == [("p000", "p001", "p002")]


@pytest.mark.parametrize("seed", range(60))
def test_every_group_trains_once_whole_under_one_version_whatever_the_order_failures_and_lost_slots(seed):
    rng = random.Random(seed)
    fail = {(f"p{rng.randrange(6):03d}", rng.randrange(GROUP_SIZE)) for _ in range(rng.randrange(3))}
    pools = Pools(rng, fail, lose_slot_at=rng.choice([None, 3, 9]))
    conductor = make_conductor(pools, num_prompts=rng.randint(1, 4))
    outcomes = run(conductor, num_batches=3)
    assert len(pools.trained) == len(set(pools.trained))
    for number, outcome in enumerate(outcomes):
        assert outcome.report.num_groups == len(outcome.groups) == conductor.planner.rules.num_prompts
        for tags in outcome.groups.values():
            assert sorted(tags) == list(range(GROUP_SIZE))
            assert {tag["min_global_steps"] for tag in tags.values()} == {number}
    assert [call[0] for call in pools.calls].count("commit") == 3
    generated = [key for key in pools.generated if key[0] in pools.trained]
    assert len(generated) == len(set(generated)), "nothing that was trained was generated twice"


@pytest.mark.parametrize("seed", range(40))
def test_a_trainer_that_assists_takes_part_and_the_batch_is_the_same(seed):
    rng = random.Random(seed)
    pools = Pools(rng, lose_slot_at=rng.choice([None, None, 5]))
    conductor = make_conductor(pools, num_prompts=3, assist=rng.choice(["always", "bts"]), assist_chunk_size=1)
    outcomes = run(conductor, num_batches=4)
    assert pools.trained == sorted(set(pools.trained), key=pools.trained.index) and len(pools.trained) == 12
    assert sum(outcome.report.num_assisted for outcome in outcomes) == len(pools.assisted) > 0
    assert len(set(pools.generated)) == len(pools.generated), "no sample is generated twice"
    assert sum(outcome.report.num_assists for outcome in outcomes) == len(pools.assisted)
    kinds = [interval.kind for interval in conductor.recorder.drain().intervals]
    assert kinds.count("assist") == len(pools.assisted)


def test_a_ready_fragment_goes_before_an_assist():
    pools = Pools()
    run(make_conductor(pools, num_prompts=6, assist="always", assist_chunk_size=1))
    scored_whole: set[str] = set()
    for call in pools.calls:
        if call[0] == "accumulate":
            scored_whole -= set(call[1])
        elif call[0] == "scored whole":
            scored_whole.add(call[1])
        elif call[0] == "assist":
            assert not scored_whole


@pytest.mark.parametrize("seed", range(100))
def test_stale_groups_have_one_version_within_the_bound_and_none_is_lost(seed):
    rng = random.Random(seed)
    max_versions, num_prompts = rng.randint(1, 3), rng.randint(1, 4)
    fraction = rng.choice([0.25, 0.5, 1.0])
    pools = Pools(rng, lose_slot_at=rng.choice([None, None, 9]))
    conductor = make_conductor(
        pools,
        num_prompts=num_prompts,
        slots=("s0", "s1", "s2"),
        max_versions=max_versions,
        fraction=fraction,
        assist=rng.choice(["off", "always"]),
    )
    outcomes = run(conductor, num_batches=5, between=rng.randint(0, 40), drains=rng.random() < 0.2)
    allowance = conductor.planner.rules.stale_allowance
    for number, outcome in enumerate(outcomes):
        assert len(outcome.groups) == num_prompts and not outcome.dropped_uids
        ages = []
        for tags in outcome.groups.values():
            assert sorted(tags) == list(range(GROUP_SIZE))
            (version,) = {tag["min_global_steps"] for tag in tags.values()}
            ages.append(number - version)
        for age in range(1, 6):
            assert sum(found >= age for found in ages) <= allowance(age)
    assert len(pools.trained) == len(set(pools.trained)) == 5 * num_prompts


def test_generation_of_the_next_batch_goes_on_while_the_caller_does_something_else():
    pools = Pools()
    conductor = make_conductor(pools, num_prompts=4, max_versions=1)

    async def one_batch_and_a_pause():
        await conductor.run_batch()
        before = len(pools.generated)
        for _ in range(200):
            await asyncio.sleep(0)
        return before, len(pools.generated)

    before, after = asyncio.run(one_batch_and_a_pause())
    assert before < after <= 2 * 4 * GROUP_SIZE, "all of the next batch, and nothing beyond it"


def test_a_drained_generator_does_nothing_and_has_the_newest_weights():
    pools = Pools()
    conductor = make_conductor(pools, num_prompts=4, max_versions=2)

    async def run_and_drain():
        await conductor.run_batch()
        pools.staged = 1
        await conductor.publish(1)
        await conductor.drain()
        num_calls = len(pools.calls)
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(pools.calls) == num_calls
        await conductor.run_batch()

    asyncio.run(run_and_drain())
    assert set(pools.slot_versions.values()) == {1}


def test_surplus_groups_are_withdrawn_and_are_no_failures(caplog):
    pools = Pools()
    pools.hangs_until_withdrawn = {"p001"}
    conductor = make_conductor(pools, num_prompts=3, extra_prompts=1, slots=("s0", "s1", "s2"))
    (outcome,) = run(conductor)
    assert list(outcome.groups) == ["p000", "p002", "p003"]
    assert outcome.report.dropped == {"surplus": 1}
    assert ("cancel", "p001") in pools.calls
    assert "failed" not in caplog.text


def test_what_was_published_for_nothing_is_handed_out_to_be_cleared():
    pools = Pools()
    pools.fail = {("p001", 2)}
    conductor = make_conductor(pools, num_prompts=2, slots=("s0",), max_sample_refills=0)
    (outcome,) = run(conductor)
    assert list(outcome.groups) == ["p000", "p002"] and list(outcome.dropped_uids) == ["p001"]
    assert {(name.uid, name.sample_index, name.version) for name in outcome.unwanted} == {
        ("p001", index, 0) for index in (0, 1, 3)
    }


def test_what_fails_before_the_batch_is_open_is_told_as_it_is():
    pools = Pools()

    async def begin():
        raise FloatingPointError("no memory")

    pools.begin = begin
    with pytest.raises(FloatingPointError, match="no memory"):
        run(make_conductor(pools))
    assert ("abort",) not in pools.calls


def test_what_fails_in_training_aborts_the_gradient_and_reaches_the_caller():
    pools = Pools(fail_accumulate_at=1)
    with pytest.raises(FloatingPointError, match="a kernel failed"):
        run(make_conductor(pools))
    assert pools.calls[-1] == ("abort",) and not pools.is_open and pools.version == 0


def test_a_batch_without_a_single_group_stops_the_run_and_says_why():
    pools = Pools(fail={(f"p{number:03d}", 0) for number in range(20)})
    pools.fail = AlwaysFails()
    with pytest.raises(RunStopped, match=r"every group was dropped .*no luck"):
        run(make_conductor(pools))
    assert pools.calls[-1] == ("abort",)


class AlwaysFails(set):
    """Contains everything and stays as it is."""

    def __contains__(self, item):
        return True

    def __isub__(self, other):
        return self


def test_losing_every_slot_stops_the_run():
    pools = Pools(lose_slot_at=0)
    with pytest.raises(RunStopped, match="every replica is lost"):
        run(make_conductor(pools, slots=("s1",)))


def test_the_timeline_shows_who_generated_trained_and_waited():
    conductor = make_conductor(Pools())
    run(conductor)
    intervals = conductor.recorder.drain().intervals
    kinds = {(interval.lane.pool, interval.kind) for interval in intervals}
    assert kinds >= {
        ("generator", "generate"),
        ("generator", "wait"),
        ("reward", "score"),
        ("trainer", "train"),
        ("trainer", "wait"),
        ("trainer", "commit"),
    }
    assert sum(interval.num_samples for interval in intervals if interval.kind == "train") == 3 * GROUP_SIZE
