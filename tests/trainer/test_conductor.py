# SPDX-License-Identifier: Apache-2.0
"""The conductor against pools made of events: no Ray, no clock but a counter."""

import asyncio
import itertools
import random

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
        self.generated, self.trained, self.calls = [], [], []
        self.is_open = False
        self.version = 0

    async def _pause(self):
        for _ in range(self.rng.randint(0, 6) if self.rng else 1):
            await asyncio.sleep(0)

    async def generate(self, slot, chunk):
        self.calls.append(("generate", slot, chunk.uid, chunk.samples))
        await self._pause()
        if self.lose_slot_at is not None and len(self.generated) >= self.lose_slot_at and slot == "s1":
            self.lose_slot_at = None
            return GeneratedChunk(dict.fromkeys(chunk.samples, "died"), is_slot_lost=True)
        failed = {index for index in chunk.samples if (chunk.uid, index) in self.fail}
        self.fail -= {(chunk.uid, index) for index in failed}
        self.generated += [(chunk.uid, index) for index in chunk.samples if index not in failed]
        self.done = getattr(self, "done", {}) | {chunk.id: [index for index in chunk.samples if index not in failed]}
        return GeneratedChunk(dict.fromkeys(failed, "no luck"), is_slot_lost=False)

    async def collect(self, chunk):
        await self._pause()
        tags = {
            index: {"reward": float(index), "min_global_steps": chunk.version, "max_global_steps": chunk.version}
            for index in self.done[chunk.id]
        }
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
        BatchRules(num_prompts, GROUP_SIZE, max_group_refills=2, max_sample_refills=3, **rules),
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
        recorder=recorder,
        lanes=Lanes(Lane("trainer", 0, "here", 1), Lane("reward", 0, "here", 0), lanes),
    )


def run(conductor, num_batches=1):
    async def batches():
        outcomes = []
        for number in range(num_batches):
            outcomes.append(await conductor.run_batch())
            conductor.publish(number + 1)
        return outcomes

    return asyncio.run(batches())


def test_the_first_group_trains_while_later_ones_are_generated():
    pools = Pools()
    run(make_conductor(pools, num_prompts=8))
    order = [call[0] for call in pools.calls]
    first_training = order.index("accumulate")
    assert "generate" in order[first_training:], "generation went on"
    assert pools.calls[first_training][1] == ("p000",)
    assert order[0] == "begin" and order[-1] == "commit"


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
