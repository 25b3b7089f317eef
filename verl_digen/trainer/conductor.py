# SPDX-License-Identifier: Apache-2.0
"""Logical batches on separate pools: asks the planner what to do next, has it done, tells the planner what happened.

    prompts --> planner <------------------------------ events ------------------------------+
                  |  assign()                                                                 |
                  +--> generator: chunk to a slot ... generated ... scored and published -----+
                  |               new weights to a replica, between two chunks ---------------+
                  |  next_for_trainer()                                                       |
                  +--> trainer: begin, accumulate(fragment) ..., commit ----------------------+
                       or, at a bubble, assist: generate chunks itself ... each scored and published

    run_batch ... publish ... run_batch ... publish       the caller moves weights, then saves, validates and logs
              ^^^         ^^^                             slots keep working; after `publish` the next batch has begun

The conductor decides nothing: `verl_digen.schedulers` does, which simulates with the same code. Three coroutines do the
work. Whichever changes the planner's state calls `_go_on`. Nothing polls.

| coroutine | consumes | waits for | unblocked by |
| --- | --- | --- | --- |
| `_train_batch`, one | ready fragments | any event, at a bubble also for the moment that the planner named | `_go_on` |
| `_way_of_chunk`, one per busy slot | a chunk | its slot, then its rewards | the agent loop worker, or a deadline |
| `ReplicaSlots._load`, one per loading replica | new weights | the replica | the replica, or a deadline |

docs/architecture.md and docs/faults.md say what follows a failure. A sample whose scoring is overdue is not scored.
When the last replica dies, `run_batch` returns None, and the batch stays open until one joins. What fails in a call of
the trainer, or in a notification to an agent loop worker, is not retried: after a call that failed on some ranks only,
others may hang in a collective.

Invariants (tests/trainer/test_conductor.py)
- A free slot gets the next chunk at once; a free trainer a ready fragment, unless it waits for a larger one.
- A group is trained once, whole, under one weight version; published samples of other groups are returned for clearing.
- An exception anywhere aborts the open gradient: the model is its last committed state.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from verl_digen.agent_loop.chunks import GeneratedChunk, ScoredChunk, described
from verl_digen.errors import DeadlineMissed, RunStopped
from verl_digen.observe.timeline.interval import Lane
from verl_digen.observe.timeline.recorder import Recorder
from verl_digen.processes.calls import CallsUnderWay, to_the_end
from verl_digen.processes.deadlines import CallKind, Deadlines
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.types import (
    TRAINER,
    Assist,
    BatchReport,
    Chunk,
    Fragment,
    Generate,
    LoadWeights,
    TrainerDecision,
    Wait,
)
from verl_digen.store.keys import SampleName
from verl_digen.trainer.pools import GeneratorPool, ReplicaSlots, TrainerPool
from verl_digen.trainer.published import BatchOutcome, PublishedSamples
from verl_digen.trainer.timelines import IdleLanes, Joining

logger = logging.getLogger(__name__)

RECONSIDER_MARGIN_S = 0.01
"""Added to a predicted moment, so that it has passed by every clock when the trainer asks again."""

REWARD = "rewards"
"""Callee name of the reward workers in `Deadlines`; other callees are a slot's id or TRAINER."""


class Conductor:
    """Runs the logical batches of a run, one after the other.

    Args:
        draw_prompts: (batch, count) -> draws `count` prompts for the batch and returns their uids.
        replicas: the run's first ones; they have the planner's weights.
        deadlines: bound of each call, which every wait has; learns from the durations of calls.
        recorder: the timeline, in which `trainer_lane`, `reward_lane` and the lanes of replicas have work and waits.
    """

    def __init__(
        self,
        planner: BatchPlanner,
        generator: GeneratorPool,
        trainer: TrainerPool,
        draw_prompts: Callable[[int, int], Sequence[str]],
        *,
        replicas: Sequence[Joining],
        deadlines: Deadlines,
        recorder: Recorder,
        trainer_lane: Lane,
        reward_lane: Lane,
    ):
        self.planner, self.generator, self.trainer, self.draw_prompts = planner, generator, trainer, draw_prompts
        self.deadlines, self.recorder = deadlines, recorder
        self.trainer_lane, self.reward_lane = trainer_lane, reward_lane
        self.last_failure = ""
        """Reason of the last failed sample."""
        self._calls = CallsUnderWay(deadlines)
        self._idle = IdleLanes(recorder)
        self._slots = ReplicaSlots(planner, generator, self._calls, deadlines, recorder, self._idle, go_on=self._go_on)
        for replica in replicas:
            self._slots.join(replica, planner.published)
        self._chunks: dict[int, Chunk] = {}
        """Chunks in generation or in scoring, by id."""
        self._withdrawn: set[int] = set()
        """Ids of in-flight chunks that were cancelled."""
        self._is_open = False
        """True while the trainer has a batch open."""
        self._slowest_decision_s = 0.0
        """Longest time that the planner took to decide what the trainer does in it."""
        self._published: dict[int, PublishedSamples] = {}
        """Batch -> its published samples."""
        self._may_draw = False
        """True while prompts may be drawn."""
        self._may_begin = True
        """True while groups may be begun."""

    # -- public methods -----------------------------------------------------------------------------------
    async def run_batch(self) -> BatchOutcome | None:
        """Generate, score and train one logical batch, up to its commit. Slots go on with the next one meanwhile.

        Returns None if no slot is left; the batch stays open: `publish` to slots that join and call again, or `abort`.
        Prompts are drawn only while this runs, and in `publish`. If this raises, the open gradient is discarded.
        """
        self._may_begin = self._may_draw = True
        try:
            return await self._calls.run(self._train_batch())
        except BaseException:
            self._calls.end()
            await self.abort()
            raise

    async def abort(self) -> None:
        """Discard the open gradient, if there is one."""
        if self._is_open:
            await to_the_end(self.trainer.abort(), self.deadlines.config.answer_s, "`abort` of the trainer's ranks")

    async def publish(self, version: int, lost_slots: Sequence[str] = (), joining: Sequence[Joining] = ()) -> None:
        """Announce that every replica has received `version` and may load it between two chunks. Prompts of the next
        batch are drawn, so that it begins while the caller saves, validates and logs.

        `lost_slots` are of replicas that died, now or before; `joining` are restarted replicas, and living ones whose
        slots had been given up.
        """
        self._calls.raise_failure()
        for slot in lost_slots:
            self._slots.lose(slot)
        self.planner.on_published(version)
        for replica in joining:
            logger.warning("replica %s joins with slots %s", replica.replica, ", ".join(replica.slots))
            self._slots.join(replica, version)
        self._may_draw = True
        self._feed()
        self._may_draw = False

    async def drain(self) -> None:
        """Wait until no chunk is in flight and every slot has the newest weights; `run_batch` resumes feeding."""
        self._may_begin = False
        self._feed()
        await self._calls.run(self._all_ended())

    async def _all_ended(self) -> None:
        while self._calls:
            await self._calls.changed()

    # -- deciding -----------------------------------------------------------------------------------------
    @property
    def _step(self) -> int:
        """Number of the current optimizer step; the first is 1."""
        return self.planner.batch + 1

    def _go_on(self) -> None:
        """After an event: feed the slots, then wake the trainer."""
        self._feed()
        self._calls.notify()

    def _feed(self) -> None:
        """Draw prompts, give chunks and new weights to free slots, cancel chunks that are no longer wanted."""
        for batch, count in self.planner.prompts_wanted().items() if self._may_draw else ():
            self.planner.on_prompts(batch, self.draw_prompts(batch, count))
        for decision in self.planner.assign(self.recorder.now_s(), begins=self._may_begin):
            if isinstance(decision, LoadWeights):
                self._slots.unload(decision.slot)
            else:
                self._chunks[decision.chunk.id] = decision.chunk
                self._calls.spawn(self._way_of_chunk(decision))
        for chunk_id in sorted(self._chunks.keys() & self.planner.take_cancelled()):
            self._withdrawn.add(chunk_id)
            self._cancel(self._chunks[chunk_id])

    def _cancel(self, chunk: Chunk) -> None:
        # a hung replica is detected by the bound of its chunk
        self._calls.tell(self.generator.cancel(chunk), f"cancelling chunk {chunk.id}", may_be_late=True)

    # -- the trainer --------------------------------------------------------------------------------------
    async def _train_batch(self) -> BatchOutcome | None:
        """Train what is ready, assist where it pays, and commit when the batch is whole; None if no slot is left.

        A free trainer asks the planner after every event, and between two events at most once more, at the moment that
        the planner named. If that moment passes too (a slot is slower than predicted), it waits for the next event.
        """
        self._feed()
        if not self._is_open:  # else it waited for a replica
            what, bound = f"step {self._step}: opening a batch in the trainer", self.deadlines.bound("train", TRAINER)
            await self._calls.call(self.trainer.begin(), what=what, bound=bound)
            self._is_open, self._slowest_decision_s = True, 0.0
        may_ask_again = True
        while True:
            self._feed()
            decision = self._decide()
            if isinstance(decision, Wait):
                if not self._calls:
                    if not any(map(self.planner.has_slot, self.generator.replicas)):
                        return None
                    why = f"the prompts ran out. The last failure was: {self.last_failure or 'none'}"
                    raise RunStopped(f"step {self._step}: nothing is under way and the batch is not whole: {why}")
                self._idle.wait(self.trainer_lane, decision.reason, self._step)
                may_ask_again = await self._calls.changed(_until(decision) if may_ask_again else None)
                continue
            self._idle.stop(self.trainer_lane)
            if isinstance(decision, BatchReport):
                return await self._commit(decision)
            if isinstance(decision, Fragment):
                await self._train(decision)
            else:
                await self._assist(decision)
            may_ask_again = True

    def _decide(self) -> TrainerDecision:
        now_s = self.recorder.now_s()
        decision = self.planner.next_for_trainer(now_s)
        self._slowest_decision_s = max(self._slowest_decision_s, self.recorder.now_s() - now_s)
        return decision

    async def _train(self, fragment: Fragment) -> None:
        """Add the gradient of a fragment."""
        published = self._published[fragment.batch].groups
        groups = {uid: published[uid] for uid in fragment.uids}
        with self.recorder.interval(
            "train",
            self.trainer_lane,
            step=fragment.batch + 1,
            version=fragment.batch,
            fragment_id=fragment.id,
            group_ids=fragment.uids,
            num_samples=sum(map(len, groups.values())),
        ):
            what = f"training fragment {fragment.id} ({len(groups)} groups) on the trainer"
            await self._of_trainer("train", self.trainer.accumulate(fragment, groups), what, size=len(groups))
        self.planner.on_trained(fragment.id, self.recorder.now_s())

    async def _assist(self, decision: Assist) -> None:
        """Have the trainer generate chunks; they are scored while it goes on."""
        chunks, size = decision.chunks, self.planner.rules.assist_rounds(decision.num_samples)
        # the prompts' conditions are published for it, even if none of the samples ever is
        condition_keys = [self.generator.condition_key(chunk) for chunk in chunks]
        self._published.setdefault(chunks[0].batch, PublishedSamples()).condition_keys.update(condition_keys)
        self._chunks |= {chunk.id: chunk for chunk in chunks}
        with self.recorder.interval("assist", self.trainer_lane, **_facts(chunks)) as detail:
            detail["reason"] = decision.reason
            if decision.predicted_gain_s is not None:
                detail["predicted_gain_s"] = decision.predicted_gain_s
            what = f"{described(*chunks)} on the trainer"
            answers = await self._of_trainer("assist", self.generator.assist(chunks), what, size=size)
        for chunk, generated, key in zip(chunks, answers, condition_keys, strict=True):
            self._on_generated(chunk, generated)
            self._calls.spawn(self._score(chunk, generated, key))

    async def _commit(self, report: BatchReport) -> BatchOutcome:
        """Take the optimizer step."""
        if report.num_groups == 0:
            raise RunStopped(
                f"step {report.batch + 1}: every group was dropped ({dict(report.dropped)}); the last failure was: "
                f"{self.last_failure or 'none, all rewards of each group were equal'}"
            )
        with self.recorder.interval("commit", self.trainer_lane, step=self._step, version=report.batch):
            metrics = await self._of_trainer("commit", self.trainer.commit(), "the optimizer step of the trainer")
        self._is_open = self._may_draw = False
        self.planner.on_committed(report.batch)
        return BatchOutcome(report, metrics, self._slowest_decision_s, self._published.pop(report.batch))

    async def _of_trainer(self, kind: CallKind, work: Awaitable[Any], what: str, *, size: int = 1) -> Any:
        """Answer of the trainer to a call of `size` items."""
        bound = self.deadlines.bound(kind, TRAINER, size=size)
        answer, took_s = await self._calls.call(work, what=f"step {self._step}: {what}", bound=bound)
        self.deadlines.observe(kind, TRAINER, size=size, seconds=took_s)
        return answer

    # -- chunks -------------------------------------------------------------------------------------------
    async def _way_of_chunk(self, decision: Generate) -> None:
        """Have a slot generate a chunk, which frees the slot, and have it scored and published."""
        slot, chunk = decision
        condition_key = self.generator.condition_key(chunk)
        lane, size = self.generator.replicas[slot].lane, len(chunk.samples)
        self._idle.stop(lane)
        try:
            with self.recorder.interval("generate", lane, **_facts([chunk])):
                bound = self.deadlines.bound("generate", slot, size=size)
                what = f"{described(chunk)} on slot {slot}"
                generated, took_s = await self._calls.call(self.generator.generate(slot, chunk), what=what, bound=bound)
        except DeadlineMissed as error:
            self._forget(chunk)
            self._slots.give_up(slot, error)
            self._calls.tell(self.generator.discard(chunk), f"discarding chunk {chunk.id}")
            return self._go_on()
        if generated.is_slot_lost:
            self._forget(chunk)
            self._slots.lose(slot)
            return self._go_on()
        if self.planner.has_slot(slot):  # else lost while it generated
            reason = "staleness_bound" if self.planner.rules.staleness.max_versions else "no_chunk_left"
            self._idle.wait(lane, reason, self._step)
        if chunk.id not in self._withdrawn:
            self.deadlines.observe("generate", slot, size=size, seconds=took_s)
        self._on_generated(chunk, generated)
        self._go_on()
        await self._score(chunk, generated, condition_key)

    def _on_generated(self, chunk: Chunk, generated: GeneratedChunk) -> None:
        if chunk.id in self._withdrawn:  # the scores of what it generated may wait for samples that nobody generates
            self._cancel(chunk)
        self.planner.on_generated(chunk.id, self.recorder.now_s())
        self._on_failed(chunk, generated.failures)

    async def _score(self, chunk: Chunk, generated: GeneratedChunk, condition_key: str) -> None:
        """Wait until the samples of a generated chunk are scored and published."""
        size = len(chunk.samples)
        num_left = size - len(generated.failures)
        facts = {"step": chunk.batch + 1, "group_ids": (chunk.uid,), "num_samples": num_left}
        try:
            with self.recorder.interval("score", self.reward_lane, **facts):
                bound = self.deadlines.bound("score", REWARD, size=size)
                what = f"scoring {described(chunk)}"
                scored, took_s = await self._calls.call(self.generator.collect(chunk), what=what, bound=bound)
        except DeadlineMissed as error:
            names = [SampleName(chunk.uid, index, chunk.version) for index in chunk.samples]
            self._published_with(chunk).doubt(names, condition_key)
            self._on_failed(chunk, dict.fromkeys(chunk.samples, str(error)))
            self._calls.tell(self.generator.discard(chunk), f"discarding chunk {chunk.id}")
        else:
            self.deadlines.observe("score", REWARD, size=size, seconds=took_s)
            self._on_scored(chunk, scored)
        self._forget(chunk)
        self._go_on()

    def _forget(self, chunk: Chunk) -> None:
        del self._chunks[chunk.id]
        self._withdrawn.discard(chunk.id)

    def _published_with(self, chunk: Chunk) -> PublishedSamples:
        """Published samples of the chunk's batch, or of the current batch if that one is over."""
        return self._published.setdefault(max(chunk.batch, self.planner.batch), PublishedSamples())

    def _on_scored(self, chunk: Chunk, scored: ScoredChunk) -> None:
        self._on_failed(chunk, scored.failures)
        published = self._published_with(chunk)
        for index, tag in scored.tags.items():
            used = self.planner.on_scored(chunk.id, {index: tag.reward}, tag.facts.version, self.recorder.now_s())
            published.add(tag, is_wanted=index in used)

    def _on_failed(self, chunk: Chunk, failures: Mapping[int, str]) -> None:
        if not failures or chunk.id in self._withdrawn:
            return
        reason = next(iter(failures.values()))
        if reason != self.last_failure:  # else it is only counted
            logger.warning("%d samples of group %s failed: %s", len(failures), chunk.uid, reason)
        self.last_failure = reason
        self.planner.on_failed(chunk.id, list(failures))


def _until(wait: Wait) -> float | None:
    """Seconds until the trainer asks again; None: not before the next event."""
    wait_s = wait.predicted_wait_s
    return None if wait_s is None or wait_s == float("inf") else wait_s + RECONSIDER_MARGIN_S


def _facts(chunks: Sequence[Chunk]) -> Any:
    """Facts of the interval of one call's chunks; it has the first one's number."""
    return {
        "step": chunks[0].batch + 1,
        "version": chunks[0].version,
        "chunk_id": chunks[0].id,
        "group_ids": tuple(chunk.uid for chunk in chunks),
        "num_samples": sum(len(chunk.samples) for chunk in chunks),
    }
