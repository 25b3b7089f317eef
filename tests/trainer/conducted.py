# SPDX-License-Identifier: Apache-2.0
"""The conductor with fake pools driven by events: no Ray, and a counter in place of the clock."""

import asyncio
import itertools

from tests.schedulers.flat import make_rules
from tests.tags import make_tag
from verl_digen.agent_loop.chunks import GeneratedChunk, ScoredChunk
from verl_digen.observe.timeline.interval import Lane
from verl_digen.observe.timeline.recorder import Recorder
from verl_digen.processes.deadlines import Deadlines, DeadlinesConfig
from verl_digen.schedulers.durations import MeasuredDurations
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.trainer.conductor import Conductor
from verl_digen.trainer.timelines import Joining

GROUP_SIZE = 4
SCORE_S = 70.0

DEADLINES = DeadlinesConfig()


class Pools:
    """Generator and trainer whose answers come when the test, or a seeded order, says so."""

    def __init__(self, rng=None, fail=(), lose_slot_at=None, fail_accumulate_at=None):
        self.rng, self.fail, self.done = rng, set(fail), {}
        self.lose_slot_at, self.fail_accumulate_at = lose_slot_at, fail_accumulate_at
        self.generated, self.assisted, self.trained, self.calls = [], [], [], []
        self.is_open = False
        self.version = self.staged = 0
        self.slot_versions = {}
        self.withdrawn, self.replicas = set(), {}
        self.hangs_until_withdrawn = set()

    async def _pause(self):
        for _ in range(self.rng.randint(0, 6) if self.rng else 1):
            await asyncio.sleep(0)

    def join(self, replica):
        self.replicas |= dict.fromkeys(replica.slots, replica)

    def leave(self, replica):
        pass

    def condition_key(self, chunk):
        return f"conditions of {chunk.uid}"

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
            self.done[chunk.id] = []
            return GeneratedChunk(dict.fromkeys(chunk.samples, "withdrawn"), is_slot_lost=False)
        failed = {index for index in chunk.samples if (chunk.uid, index) in self.fail}
        self.fail -= {(chunk.uid, index) for index in failed}
        self.done[chunk.id] = [index for index in chunk.samples if index not in failed]
        self.generated += [(chunk.uid, index) for index in self.done[chunk.id]]
        return GeneratedChunk(dict.fromkeys(failed, "no luck"), is_slot_lost=False)

    async def cancel(self, chunk):
        self.calls.append(("cancel", chunk.uid))
        self.withdrawn.add(chunk.id)

    async def discard(self, chunk):
        self.calls.append(("discard", chunk.id))

    async def end_replica(self, replica):
        self.calls.append(("end", tuple(replica.slots)))

    async def assist(self, chunks):
        self.calls.append(("assist", *((chunk.uid, chunk.samples) for chunk in chunks)))
        assert self.is_open
        self.assisted += [(chunk.uid, index) for chunk in chunks for index in chunk.samples]
        return [await self._make(chunk) for chunk in chunks]

    async def load(self, slots):
        self.calls.append(("load", tuple(slots)))
        await self._pause()
        self.slot_versions |= dict.fromkeys(slots, self.staged)
        return self.staged

    async def collect(self, chunk):
        await self._pause()
        tags = {
            index: make_tag(
                float(index),
                uid=chunk.uid,
                sample_index=index,
                version=chunk.version,
                condition_key=self.condition_key(chunk),
            )
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


def make_conductor(pools, num_prompts=3, slots=("s0", "s1"), now_s=None, replicas=None, deadlines=DEADLINES, **rules):
    clock = itertools.count()
    recorder = Recorder(now_s=now_s or (lambda: float(next(clock))))
    planner = BatchPlanner(
        make_rules(num_prompts, GROUP_SIZE, **{"max_group_refills": 2, "max_sample_refills": 3, **rules}),
        MeasuredDurations(),
        first_batch=0,
        num_batches=1_000_000,
    )
    replicas = [[slot] for slot in slots] if replicas is None else replicas
    numbers = itertools.count()
    return Conductor(
        planner,
        pools,
        pools,
        lambda batch, count: [f"p{next(numbers):03d}" for _ in range(count)],
        replicas=[
            Joining(slots[0], None, Lane("generator", number, "here", 1), slots)
            for number, slots in enumerate(replicas)
        ],
        deadlines=Deadlines(deadlines, SCORE_S),
        recorder=recorder,
        trainer_lane=Lane("trainer", 0, "here", 1),
        reward_lane=Lane("reward", 0, "here", 0),
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
