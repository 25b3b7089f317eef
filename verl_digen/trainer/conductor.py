# SPDX-License-Identifier: Apache-2.0
"""Logical batches on separate pools: asks the planner what to do next, has it done, tells the planner what happened.

    prompts --> planner <------------------------------ events ------------------------------+
                  |  assign()                                                                 |
                  +--> generator: chunk to a slot ... generated ... scored and published -----+
                  |               new weights to a replica, between two chunks ---------------+
                  |  next_for_trainer()                                                       |
                  +--> trainer: begin, accumulate(fragment) ..., commit ----------------------+
                       or, at a bubble, assist: generate chunks itself ... each scored and published

The conductor decides nothing: which chunk goes where, when a fragment is ready, whether the trainer assists and when
the batch is complete is decided by `verl_digen.schedulers`, which simulates with the same code.

It never polls: every event is a task. A free trainer asks the planner after every event, and between two events at
most once more, at the moment that the planner named. If that moment passes too (a slot is slower than predicted), the
trainer waits for the next event.

    run_batch ... publish ... run_batch ... publish       the caller moves weights, then saves, validates and logs
              ^^^         ^^^ keep_feeding                slots keep working; after `publish` the next batch has begun

| who waits | for whom | bound |
| --- | --- | --- |
| conductor | the next event | one chunk per slot, its scores, one call of the trainer; each has a deadline |
| trainer | a ready fragment | the batch |
| slot | the conductor, between two chunks | one round trip |

Failures and their effect on the step:

| what happens | what follows |
| --- | --- |
| a sample is not generated or scored | retried, within `digen.queue.max_sample_refills`; else its group is dropped |
| a group is dropped | replaced by a new prompt, within `digen.max_refills_per_step`; else the batch is smaller |
| a replica dies | all of its slots are lost; their whole chunks go to other slots; the run goes on without it |
| a chunk or a load is overdue | the same, and the replica's processes are killed |
| scoring a chunk is overdue | its samples count as not scored |
| the last replica dies | `run_batch` returns None; the batch stays open until one joins |
| an exception in a call of the trainer, a dead rank or agent loop worker | `abort`, then raised |
| a call of the trainer, or a notification to an agent loop worker, is overdue | the same |

The last two are not retried: after a call that failed on some ranks only, others may hang in a collective.

Invariants (tests/trainer/test_conductor.py)
- A free slot gets the next chunk at once; a free trainer a ready fragment, unless it waits for a larger one.
- A group is trained once, whole, under one weight version; published samples of other groups are returned for clearing.
- An exception anywhere aborts the open gradient: the model is its last committed state.
- Every wait has a bound (`verl_digen.processes.deadlines`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from verl_digen.agent_loop.chunks import GeneratedChunk, ScoredChunk, described
from verl_digen.errors import DeadlineMissed, RunStopped
from verl_digen.observe.timeline import Kind, Lane, Recorder
from verl_digen.observe.timeline.recorder import OpenInterval
from verl_digen.processes.calls import CallsUnderWay, cancel, to_the_end
from verl_digen.processes.deadlines import Deadlines
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.types import (
    TRAINER,
    Assist,
    BatchReport,
    Chunk,
    Commit,
    Fragment,
    Generate,
    LoadWeights,
    Train,
    Wait,
)
from verl_digen.store.keys import SampleName
from verl_digen.trainer.lanes import IdleLanes, Joining, Lanes
from verl_digen.trainer.pools import GeneratorPool, TrainerPool
from verl_digen.trainer.published import BatchOutcome, PublishedSamples, check_one_version
from verl_digen.trainer.slots import ReplicaSlots

logger = logging.getLogger(__name__)

RECONSIDER_MARGIN_S = 0.01
"""Added to a predicted moment, so that it has passed by every clock when the trainer asks again."""

REWARD = "rewards"
"""Callee name of the reward workers in `Deadlines`; other callees are a slot's id or TRAINER."""


class Conductor:
    """Args:
    planner: makes all decisions.
    draw_prompts: (batch, count) -> draws `count` prompts for the batch and returns their uids.
    slots_of: slot -> all slots of its replica.
    deadlines: bound of each call; learns from the durations of calls.
    recorder, lanes: the timeline, and the lanes to record work and waits in.
    """

    def __init__(
        self,
        planner: BatchPlanner,
        generator: GeneratorPool,
        trainer: TrainerPool,
        draw_prompts: Callable[[int, int], Sequence[str]],
        *,
        slots_of: Mapping[str, Sequence[str]],
        deadlines: Deadlines,
        recorder: Recorder,
        lanes: Lanes,
    ):
        self.planner, self.generator, self.trainer, self.draw_prompts = planner, generator, trainer, draw_prompts
        self.deadlines, self.recorder, self.lanes = deadlines, recorder, lanes
        self.last_failure = ""
        """Reason of the last failed sample."""
        self._calls = CallsUnderWay(deadlines)
        self._idle = IdleLanes(recorder)
        self._slots = ReplicaSlots(
            planner, generator, self._calls, deadlines, recorder, self._idle, slots_of=slots_of, lanes=lanes.slots
        )
        self._chunks: dict[int, Chunk] = {}
        """Chunks in generation or in scoring, by id."""
        self._withdrawn: set[int] = set()
        """Ids of those of them that were cancelled."""
        self._is_open = False
        """True while the trainer has a logical batch open."""
        self._trainer_is_free = False
        self._outcome: BatchOutcome | None = None
        """Outcome of the current batch, once it is committed."""
        self._trained: set[str] = set()
        self._published: dict[int, PublishedSamples] = {}
        """Batch -> its published samples."""
        self._slowest_decision_s = 0.0
        self._feeding: asyncio.Task[None] | None = None

    # -- public methods -----------------------------------------------------------------------------------
    async def run_batch(self) -> BatchOutcome | None:
        """Generate, score and train one logical batch, up to its commit. Slots are fed until the next call.

        Returns None if no slot is left; the batch stays open: `publish` to slots that join and call again, or `abort`.

        Raises:
            RunStopped: every group of it was dropped. Any exception of the pools; the open gradient is discarded.
        """
        await self._stop_feeding()
        if not self._is_open:  # else it waited for a replica
            self._outcome, self._trained, self._slowest_decision_s = None, set(), 0.0
            what, bound = f"step {self._step}: opening a batch in the trainer", self.deadlines.bound("train", TRAINER)
            self._calls.start(self.trainer.begin(), what=what, bound=bound, on_ended=self._on_begun)
        may_ask_again = True
        try:
            while self._outcome is None:
                self._feed()
                wait_s = self._engage_trainer() if self._trainer_is_free else None
                if not self._calls and not any(map(self.planner.has_slot, self._slots.slots_of)):
                    return None
                may_ask_again = await self._next_events(wait_s if may_ask_again else None)
        except BaseException:
            await self.abort()
            raise
        self._feeding = asyncio.ensure_future(self._keep_feeding())
        return self._outcome

    async def abort(self) -> None:
        """Discard the open gradient, if there is one."""
        if self._is_open:
            await to_the_end(self.trainer.abort(), self.deadlines.config.answer_s, "`abort` of the trainer's ranks")

    async def publish(self, version: int, lost_slots: Sequence[str] = (), joining: Sequence[Joining] = ()) -> None:
        """Announce that every replica has received `version` and may load it between two chunks. Prompts of the next
        batch are drawn, so that it begins while the caller saves, validates and logs.

        Args:
            lost_slots: slots of replicas that died, now or before.
            joining: restarted replicas, and living replicas whose slots had been given up.
        """
        await self._stop_feeding()
        for slot in lost_slots:
            self._slots.lose(slot)
        self.planner.on_published(version)
        for replica in joining:
            self._slots.join(replica, version)
        self._feed()
        self._feeding = asyncio.ensure_future(self._keep_feeding())

    async def drain(self) -> None:
        """Wait until no chunk is in flight and every slot has the newest weights; `run_batch` resumes feeding."""
        await self._stop_feeding()
        self._feed(draws=False, begins=False)
        while self._calls:
            await self._next_events(None)
            self._feed(draws=False, begins=False)

    async def _keep_feeding(self) -> None:
        """Handle events and feed slots between two batches, until cancelled."""
        while True:
            self._feed(draws=False)
            if not self._calls:
                return
            await self._next_events(None)

    async def _stop_feeding(self) -> None:
        """Cancel `_keep_feeding`; an exception that it raised is raised here."""
        feeding, self._feeding = self._feeding, None
        if feeding is not None:
            await cancel(feeding)

    # -- deciding -----------------------------------------------------------------------------------------
    @property
    def _step(self) -> int:
        """Number of the current optimizer step; the first is 1."""
        return self.planner.batch + 1

    def _feed(self, *, draws: bool = True, begins: bool = True) -> None:
        """Give prompts to the planner, chunks and new weights to free slots, cancel chunks that are no longer wanted.

        Args:
            draws: whether prompts may be drawn now. begins: whether groups may be begun now.
        """
        for batch, count in self.planner.prompts_wanted().items() if draws else ():
            self.planner.on_prompts(batch, self.draw_prompts(batch, count))
        for decision in self.planner.assign(self.recorder.now_s(), begins=begins):
            if isinstance(decision, LoadWeights):
                self._slots.unload(decision.slot)
            else:
                self._start_chunk(decision)
        for chunk_id in sorted(self._chunks.keys() & self.planner.take_cancelled()):
            self._withdrawn.add(chunk_id)
            cancelling = self.generator.cancel(self._chunks[chunk_id])
            # a hung replica is detected by the bound of its chunk
            self._calls.tell(cancelling, f"cancelling chunk {chunk_id}", on_overdue=partial(logger.warning, "%s"))

    def _engage_trainer(self) -> float | None:
        """Have the free trainer do what the planner says -> seconds until it asks again; None: at the next event."""
        now_s = self.recorder.now_s()
        decision = self.planner.next_for_trainer(now_s)
        self._slowest_decision_s = max(self._slowest_decision_s, self.recorder.now_s() - now_s)
        if isinstance(decision, Wait):
            self._idle.wait(self.lanes.trainer, decision.reason, self._step)
            wait_s = decision.predicted_wait_s
            return None if wait_s is None or wait_s == float("inf") else wait_s + RECONSIDER_MARGIN_S
        self._idle.stop(self.lanes.trainer)
        self._trainer_is_free = False
        if isinstance(decision, Commit):
            self._start_commit(decision.report)
        elif isinstance(decision, Train):
            self._start_training(decision.fragment)
        else:
            self._start_assist(decision)
        return None

    # -- slots --------------------------------------------------------------------------------------------
    def _start_chunk(self, decision: Generate) -> None:
        slot, chunk = decision
        condition_key = self.generator.condition_key(chunk)
        lane = self._slots.lanes[slot]
        self._idle.stop(lane)
        opened = self._begin_chunks("generate", lane, [chunk])

        def on_generated(task: asyncio.Task[GeneratedChunk], took_s: float) -> None:
            self.recorder.end(opened)
            generated = task.result()
            if generated.is_slot_lost:
                self._forget(chunk)
                self._slots.lose(slot)
                return
            if self.planner.has_slot(slot):  # else lost while it generated
                reason = "staleness_bound" if self.planner.rules.staleness.max_versions else "no_chunk_left"
                self._idle.wait(lane, reason, self._step)
            if chunk.id not in self._withdrawn:
                self.deadlines.observe("generate", slot, size=len(chunk.samples), seconds=took_s)
            self._on_generated(chunk, generated, condition_key)

        def on_overdue(error: DeadlineMissed) -> None:
            self.recorder.end(opened)
            self._forget(chunk)
            self._slots.give_up(slot, error)
            self._calls.tell(self.generator.discard(chunk), f"discarding chunk {chunk.id}")

        self._calls.start(
            self.generator.generate(slot, chunk),
            what=f"{described(chunk)} on slot {slot}",
            bound=self.deadlines.bound("generate", slot, size=len(chunk.samples)),
            on_ended=on_generated,
            on_overdue=on_overdue,
        )

    def _begin_chunks(self, kind: Kind, lane: Lane, chunks: Sequence[Chunk]) -> OpenInterval:
        """Begin the interval of one call's chunks; it has the first one's number."""
        self._chunks |= {chunk.id: chunk for chunk in chunks}
        return self.recorder.begin(
            kind,
            lane,
            step=chunks[0].batch + 1,
            version=chunks[0].version,
            chunk_id=chunks[0].id,
            group_ids=tuple(chunk.uid for chunk in chunks),
            num_samples=sum(len(chunk.samples) for chunk in chunks),
        )

    def _on_generated(self, chunk: Chunk, generated: GeneratedChunk, condition_key: str) -> None:
        """Start collecting the samples of a generated chunk, to be scored and published; its generator is free."""
        self.planner.on_generated(chunk.id, self.recorder.now_s())
        if generated.failures:
            self._on_failed(chunk, generated.failures)
        opened = self.recorder.begin(
            "score",
            self.lanes.reward,
            step=chunk.batch + 1,
            group_ids=(chunk.uid,),
            num_samples=len(chunk.samples) - len(generated.failures),
        )

        def on_scored(task: asyncio.Task[ScoredChunk], took_s: float) -> None:
            self.recorder.end(opened)
            scored = task.result()
            self.deadlines.observe("score", REWARD, size=len(chunk.samples), seconds=took_s)
            self._on_scored(chunk, scored)
            self._forget(chunk)

        def on_overdue(error: DeadlineMissed) -> None:
            self.recorder.end(opened)
            names = [SampleName(chunk.uid, index, chunk.version) for index in chunk.samples]
            self._published_with(chunk).doubt(names, condition_key)
            self._on_failed(chunk, dict.fromkeys(chunk.samples, str(error)))
            self._forget(chunk)
            self._calls.tell(self.generator.discard(chunk), f"discarding chunk {chunk.id}")

        self._calls.start(
            self.generator.collect(chunk),
            what=f"scoring {described(chunk)}",
            bound=self.deadlines.bound("score", REWARD, size=len(chunk.samples)),
            on_ended=on_scored,
            on_overdue=on_overdue,
        )

    def _forget(self, chunk: Chunk) -> None:
        del self._chunks[chunk.id]
        self._withdrawn.discard(chunk.id)

    def _published_with(self, chunk: Chunk) -> PublishedSamples:
        """Published samples of the chunk's batch, or of the current batch if that one is over."""
        return self._published.setdefault(max(chunk.batch, self.planner.batch), PublishedSamples())

    def _on_scored(self, chunk: Chunk, scored: ScoredChunk) -> None:
        if scored.failures:
            self._on_failed(chunk, scored.failures)
        published = self._published_with(chunk)
        for index, tag in scored.tags.items():
            name = SampleName.of(chunk.uid, index, tag)
            check_one_version(name, tag)
            used = self.planner.on_scored(chunk.id, {index: tag.reward}, name.version, self.recorder.now_s())
            published.add(name, tag, is_wanted=index in used)

    def _on_failed(self, chunk: Chunk, failures: Mapping[int, str]) -> None:
        if chunk.id in self._withdrawn:
            return
        self.last_failure = next(iter(failures.values()))
        logger.warning("%d samples of group %s failed: %s", len(failures), chunk.uid, self.last_failure)
        self.planner.on_failed(chunk.id, list(failures))

    # -- the trainer --------------------------------------------------------------------------------------
    def _on_begun(self, task: asyncio.Task[None], took_s: float) -> None:
        task.result()
        self._is_open = self._trainer_is_free = True

    def _start_training(self, fragment: Fragment) -> None:
        groups = self._published[fragment.batch].of_fragment(fragment)
        opened = self.recorder.begin(
            "train",
            self.lanes.trainer,
            step=fragment.batch + 1,
            version=fragment.batch,
            fragment_id=fragment.id,
            group_ids=fragment.uids,
            num_samples=sum(map(len, groups.values())),
        )

        def on_trained(task: asyncio.Task[None], took_s: float) -> None:
            self.recorder.end(opened)
            task.result()
            self.deadlines.observe("train", TRAINER, size=len(groups), seconds=took_s)
            self.planner.on_trained(fragment.id, self.recorder.now_s())
            self._trained.update(fragment.uids)
            self._trainer_is_free = True

        self._calls.start(
            self.trainer.accumulate(fragment, groups),
            what=f"step {self._step}: training fragment {fragment.id} ({len(groups)} groups) on the trainer",
            bound=self.deadlines.bound("train", TRAINER, size=len(groups)),
            on_ended=on_trained,
        )

    def _start_assist(self, decision: Assist) -> None:
        chunks, size = decision.chunks, self.planner.rules.assist_rounds(decision.num_samples)
        # the prompts' conditions are published for it, even if none of the samples ever is
        condition_keys = [self.generator.condition_key(chunk) for chunk in chunks]
        self._published.setdefault(chunks[0].batch, PublishedSamples()).condition_keys.update(condition_keys)
        opened = self._begin_chunks("assist", self.lanes.trainer, chunks)
        opened.detail["reason"] = decision.reason
        if decision.predicted_gain_s is not None:
            opened.detail["predicted_gain_s"] = decision.predicted_gain_s

        def on_assisted(task: asyncio.Task[Sequence[GeneratedChunk]], took_s: float) -> None:
            self.recorder.end(opened)
            answers = task.result()
            self.deadlines.observe("assist", TRAINER, size=size, seconds=took_s)
            self._trainer_is_free = True
            for chunk, generated, key in zip(chunks, answers, condition_keys, strict=True):
                self._on_generated(chunk, generated, key)

        self._calls.start(
            self.generator.assist(chunks),
            what=f"step {self._step}: {described(*chunks)} on the trainer",
            bound=self.deadlines.bound("assist", TRAINER, size=size),
            on_ended=on_assisted,
        )

    def _start_commit(self, report: BatchReport) -> None:
        if report.num_groups == 0:
            raise RunStopped(
                f"step {report.batch + 1}: every group was dropped ({dict(report.dropped)}); the last failure was: "
                f"{self.last_failure or 'none, all rewards of each group were equal'}"
            )
        opened = self.recorder.begin("commit", self.lanes.trainer, step=self._step, version=report.batch)

        def on_committed(task: asyncio.Task[dict[str, float]], took_s: float) -> None:
            self.recorder.end(opened)
            metrics = task.result()
            self.deadlines.observe("commit", TRAINER, seconds=took_s)
            self._is_open = False
            self.planner.on_committed(report.batch)
            published = self._published.pop(report.batch)
            self._outcome = published.outcome(report, metrics, self._trained, self._slowest_decision_s)

        self._calls.start(
            self.trainer.commit(),
            what=f"step {self._step}: the optimizer step of the trainer",
            bound=self.deadlines.bound("commit", TRAINER),
            on_ended=on_committed,
        )

    # -- events -------------------------------------------------------------------------------------------
    async def _next_events(self, timeout_s: float | None) -> bool:
        """Wait until something has ended, or for `timeout_s`; handle all that has. Returns False at the timeout."""
        if not self._calls:
            why = f"the prompts ran out. The last failure was: {self.last_failure or 'none'}"
            raise RunStopped(f"step {self._step}: nothing is under way and the batch is not whole: {why}")
        return await self._calls.next_events(timeout_s)
