# SPDX-License-Identifier: Apache-2.0
"""Logical batches on separate pools: asks the planner what to do next, has it done, tells the planner what happened.

    prompts --> planner <------------------------------ events ------------------------------+
                  |  assign()                                                                 |
                  +--> generator: chunk to a slot ... generated ... scored and published -----+
                  |               new weights to a replica, between two chunks ---------------+
                  |  next_for_trainer()                                                       |
                  +--> trainer: begin, accumulate(fragment) ..., commit ----------------------+
                       or, at a bubble, assist: generate a chunk itself ... scored and published

Nothing here decides: which chunk goes where, when a fragment is ready, whether the trainer assists and when the batch
is whole is said by `verl_digen.schedulers`, which simulates with the same code. Nothing here waits by polling: every
event is a task.

    run_batch ... publish ... run_batch ... publish       the caller saves, logs and moves weights in between
               ^^^^^^^^^^^ keep_feeding                   where the next batch may begin early, slots go on

| who waits | for whom | bound |
| --- | --- | --- |
| conductor | the next event | one chunk per slot, its scores, one call of the trainer |
| trainer | a ready fragment | the batch |
| slot | the conductor, between two chunks | one round trip |

What becomes of a step when something fails:

| what happens | what follows |
| --- | --- |
| a sample is not generated or scored | made again, within `digen.queue.max_sample_refills`; else its group is dropped |
| a group is dropped | replaced by a new prompt, within `digen.max_refills_per_step`; else the batch is smaller |
| a replica dies | its chunk goes to the others, whole; the run goes on without it |
| an exception in a call of the trainer, a dead rank or agent loop worker, no replica left | `abort`, and it is raised |

Why the last one is not tried again: after a call that failed on some ranks alone, others may hang in a collective.

Invariants (tests/trainer/test_conductor.py)
- A ready fragment trains at once if the trainer is free; a free slot gets the next chunk at once.
- A group is trained once, whole, under one weight version; what was published of others is handed out to be cleared.
- An exception anywhere aborts the open gradient: the model is its last committed state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_digen.agent_loop.chunks import GeneratedChunk, ScoredChunk
from verl_digen.errors import RunStopped
from verl_digen.observe.timeline import Lane, Recorder
from verl_digen.observe.timeline.recorder import OpenInterval
from verl_digen.pipeline.keys import SampleName
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.types import Assist, BatchReport, Chunk, Commit, Fragment, Generate, LoadWeights, Train, Wait

logger = logging.getLogger(__name__)

MIN_RECONSIDER_S = 0.02
"""A trainer that waits for a predicted moment asks again no sooner than this."""

Tags = Mapping[int, Mapping[str, Any]]
"""Sample index -> what the agent loop knows of the sample."""


class Generator(Protocol):
    """The generator pool: one chunk at a time per slot, and the agent loops that score and publish."""

    async def generate(self, slot: str, chunk: Chunk) -> GeneratedChunk:
        """Returns when the chunk's generation has ended."""
        ...

    async def cancel(self, chunk: Chunk) -> None:
        """Nobody wants the chunk that is being generated any more; `generate` returns soon."""
        ...

    async def assist(self, chunk: Chunk) -> GeneratedChunk:
        """Have the trainer's ranks generate the chunk; returns when that has ended."""
        ...

    async def collect(self, chunk: Chunk) -> ScoredChunk:
        """Returns when the chunk's samples are scored and published."""
        ...

    async def load(self, slots: Sequence[str]) -> int | None:
        """Let a replica, all of whose slots are given, take the newest weights -> their version; None if it died."""
        ...


class Trainer(Protocol):
    """The trainer pool."""

    async def begin(self) -> None:
        """Open a logical batch."""
        ...

    async def accumulate(self, fragment: Fragment, groups: Mapping[str, Tags]) -> None:
        """Add the gradient of complete groups."""
        ...

    async def commit(self) -> dict[str, float]:
        """The optimizer step; metrics."""
        ...

    async def abort(self) -> None:
        """Forget the open logical batch."""
        ...


@dataclass(frozen=True)
class BatchOutcome:
    """A committed batch."""

    report: BatchReport
    metrics: dict[str, float]
    """Of the optimizer step."""
    slowest_decision_s: float
    """The longest that the planner took to say what the trainer does."""
    groups: Mapping[str, Tags]
    """uid -> the samples that were trained."""
    dropped_uids: Sequence[str]
    """Groups of which something was published for nothing."""
    unwanted: Sequence[SampleName]
    """Samples that were published for nothing."""


@dataclass(frozen=True)
class Lanes:
    """Whom the timeline knows."""

    trainer: Lane
    reward: Lane
    slots: Mapping[str, Lane]
    """Slot -> its replica."""


@dataclass
class Published:
    """What was published of one batch's groups."""

    groups: dict[str, dict[int, Mapping[str, Any]]] = field(default_factory=dict)
    """uid -> sample index -> tag of the sample that counts."""
    unwanted: list[SampleName] = field(default_factory=list)
    """Samples that came too late, or that were generated again since."""


class Conductor:
    """Args:
    planner: decides.
    draw_prompts: takes so many prompts for a batch; returns their uids.
    slots_of: slot -> all slots of its replica.
    recorder, lanes: where and as whom to note who did what.
    """

    def __init__(
        self,
        planner: BatchPlanner,
        generator: Generator,
        trainer: Trainer,
        draw_prompts: Callable[[int, int], Sequence[str]],
        *,
        slots_of: Mapping[str, Sequence[str]],
        recorder: Recorder,
        lanes: Lanes,
    ):
        self.planner, self.generator, self.trainer, self.draw_prompts = planner, generator, trainer, draw_prompts
        self.slots_of, self.recorder, self.lanes = slots_of, recorder, lanes
        self.last_failure = ""
        """Why the sample that failed last did."""
        self._tasks: dict[asyncio.Task[Any], Callable[[asyncio.Task[Any]], None]] = {}
        """What is under way -> what to do with its outcome."""
        self._chunks: dict[int, Chunk] = {}
        """Those that are being generated."""
        self._withdrawn: set[int] = set()
        """Those of them that nobody wants any more."""
        self._unloaded: set[str] = set()
        """Slots that wait for the others of their replica before it takes new weights."""
        self._is_open = False
        """Whether the trainer has a logical batch open."""
        self._trainer_is_free = False
        self._outcome: BatchOutcome | None = None
        """Of the batch under way, once it is committed."""
        self._trained: set[str] = set()
        self._published: dict[int, Published] = {}
        """Batch -> what is there of it."""
        self._waiting: dict[Lane, OpenInterval] = {}
        self._slowest_decision_s = 0.0
        self._feeding: asyncio.Task[None] | None = None

    # -- what the caller asks for -------------------------------------------------------------------------
    async def run_batch(self) -> BatchOutcome:
        """Generate, score and train one logical batch, up to its commit. Slots are fed until the next call.

        Raises:
            RunStopped: every group of it was dropped. Any exception of the pools; the open gradient is forgotten.
        """
        await self._stop_feeding()
        self._outcome, self._trained = None, set()
        self._slowest_decision_s = 0.0
        self._start(self.trainer.begin(), self._on_begun)
        try:
            while self._outcome is None:
                self._feed()
                timeout_s = self._engage_trainer() if self._trainer_is_free else None
                await self._next_events(timeout_s)
        except BaseException:
            if self._is_open:
                await self.trainer.abort()
            raise
        self._feeding = asyncio.ensure_future(self._keep_feeding())
        return self._outcome

    async def publish(self, version: int, lost_slots: Sequence[str] = ()) -> None:
        """Every replica has received `version`, and may take it between two chunks.

        Args:
            lost_slots: of replicas that died, now or before.
        """
        await self._stop_feeding()
        for slot in lost_slots:
            self._lose(slot)
        self.planner.on_published(version)
        self._feed(draws=False)
        self._feeding = asyncio.ensure_future(self._keep_feeding())

    async def drain(self) -> None:
        """Return when nothing is being generated and every slot has the newest weights; `run_batch` goes on."""
        await self._stop_feeding()
        self._feed(draws=False, begins=False)
        while self._tasks:
            await self._next_events(None)
            self._feed(draws=False, begins=False)

    async def _keep_feeding(self) -> None:
        """Handle what ends between two batches, and begin what may begin, until cancelled."""
        while True:
            self._feed(draws=False)
            if not self._tasks:
                return
            await self._next_events(None)

    async def _stop_feeding(self) -> None:
        """An exception of it is raised here."""
        if self._feeding is not None:
            feeding, self._feeding = self._feeding, None
            feeding.cancel()
            with suppress(asyncio.CancelledError):
                await feeding

    # -- deciding -----------------------------------------------------------------------------------------
    @property
    def _step(self) -> int:
        """The optimizer step under way; the first is 1."""
        return self.planner.batch + 1

    def _feed(self, *, draws: bool = True, begins: bool = True) -> None:
        """Prompts to the planner, chunks and new weights to free slots, and an end to chunks that nobody wants.

        Args:
            draws: whether prompts may be drawn now. begins: whether groups may be begun now.
        """
        for batch, count in self.planner.prompts_wanted().items() if draws else ():
            self.planner.on_prompts(batch, self.draw_prompts(batch, count))
        for decision in self.planner.assign(self.recorder.now_s(), begins=begins):
            if isinstance(decision, LoadWeights):
                self._unload(decision.slot)
            else:
                self._start_chunk(decision)
        for chunk_id in self.planner.take_cancelled():
            self._withdrawn.add(chunk_id)
            self._start(self.generator.cancel(self._chunks[chunk_id]), _require_success)

    def _engage_trainer(self) -> float | None:
        """Have the trainer, which is free, do what the planner says -> seconds after which to ask again, if any."""
        now_s = self.recorder.now_s()
        decision = self.planner.next_for_trainer(now_s)
        self._slowest_decision_s = max(self._slowest_decision_s, self.recorder.now_s() - now_s)
        if isinstance(decision, Wait):
            self._wait(self.lanes.trainer, decision.reason)
            wait_s = decision.predicted_wait_s
            return None if wait_s is None or wait_s == float("inf") else max(wait_s, MIN_RECONSIDER_S)
        self._stop_waiting(self.lanes.trainer)
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
        lane = self.lanes.slots[slot]
        self._stop_waiting(lane)
        opened = self._begin_chunk("generate", lane, chunk)

        def on_generated(task: asyncio.Task[GeneratedChunk]) -> None:
            self.recorder.end(opened)
            generated = task.result()
            del self._chunks[chunk.id]
            if generated.is_slot_lost:
                self._lose(slot)
            else:
                self._wait(lane, "staleness_bound" if self.planner.rules.max_versions else "no_chunk_left")
                self._on_generated(chunk, generated)

        self._start(self.generator.generate(slot, chunk), on_generated)

    def _begin_chunk(self, kind: Any, lane: Lane, chunk: Chunk) -> OpenInterval:
        self._chunks[chunk.id] = chunk
        return self.recorder.begin(
            kind,
            lane,
            step=chunk.batch + 1,
            version=chunk.version,
            chunk_id=chunk.id,
            group_ids=(chunk.uid,),
            num_samples=len(chunk.samples),
        )

    def _on_generated(self, chunk: Chunk, generated: GeneratedChunk) -> None:
        """Whoever generated a chunk is free; its samples are being scored."""
        self.planner.on_generated(chunk.id, self.recorder.now_s())
        if generated.failures:
            self._on_failed(chunk, generated.failures)
        self._withdrawn.discard(chunk.id)
        opened = self.recorder.begin(
            "score",
            self.lanes.reward,
            step=chunk.batch + 1,
            group_ids=(chunk.uid,),
            num_samples=len(chunk.samples) - len(generated.failures),
        )

        def on_scored(task: asyncio.Task[ScoredChunk]) -> None:
            self.recorder.end(opened)
            self._on_scored(chunk, task.result())

        self._start(self.generator.collect(chunk), on_scored)

    def _on_scored(self, chunk: Chunk, scored: ScoredChunk) -> None:
        if scored.failures:
            self._on_failed(chunk, scored.failures)
        # what comes for a batch that is over is handed out with the next one
        published = self._published.setdefault(max(chunk.batch, self.planner.batch), Published())
        for index, tag in scored.tags.items():
            name = SampleName.of(chunk.uid, index, tag)
            if name.version != tag["max_global_steps"]:
                raise RuntimeError(
                    f"sample {index} of group {chunk.uid} was generated under weight versions {name.version} and "
                    f"{tag['max_global_steps']}; it must be one"
                )
            if not self.planner.on_scored(chunk.id, {index: tag["reward"]}, name.version, self.recorder.now_s()):
                published.unwanted.append(name)
                continue
            group = published.groups.setdefault(chunk.uid, {})
            if index in group:  # the group started over since, under newer weights
                published.unwanted.append(SampleName.of(chunk.uid, index, group[index]))
            group[index] = tag

    def _on_failed(self, chunk: Chunk, failures: Mapping[int, str]) -> None:
        if chunk.id in self._withdrawn:
            return
        self.last_failure = next(iter(failures.values()))
        logger.warning("%d samples of group %s failed: %s", len(failures), chunk.uid, self.last_failure)
        self.planner.on_failed(chunk.id, list(failures))

    def _unload(self, slot: str) -> None:
        """The slot is ready for new weights; its replica takes them when all of its slots are."""
        self._unloaded.add(slot)
        slots = [other for other in self.slots_of[slot] if self.planner.has_slot(other)]
        if not self._unloaded.issuperset(slots):
            return
        self._unloaded.difference_update(slots)
        lane = self.lanes.slots[slot]
        self._stop_waiting(lane)
        opened = self.recorder.begin("publish", lane, step=self.planner.published, version=self.planner.published)

        def on_loaded(task: asyncio.Task[int | None]) -> None:
            self.recorder.end(opened)
            version = task.result()
            for loaded in slots:
                if version is None:
                    self._lose(loaded)
                else:
                    self.planner.on_loaded(loaded, version)

        self._start(self.generator.load(slots), on_loaded)

    def _lose(self, slot: str) -> None:
        """Its replica died; nothing new if that is known."""
        if self.planner.has_slot(slot):
            logger.warning("slot %s is lost; the samples it was generating go to others", slot)
            self.planner.on_slot_lost(slot)

    # -- the trainer --------------------------------------------------------------------------------------
    def _on_begun(self, task: asyncio.Task[None]) -> None:
        task.result()
        self._is_open = self._trainer_is_free = True

    def _start_training(self, fragment: Fragment) -> None:
        groups = {uid: self._published[fragment.batch].groups[uid] for uid in fragment.uids}
        opened = self.recorder.begin(
            "train",
            self.lanes.trainer,
            step=fragment.batch + 1,
            version=fragment.batch,
            fragment_id=fragment.id,
            group_ids=fragment.uids,
            num_samples=sum(map(len, groups.values())),
        )

        def on_trained(task: asyncio.Task[None]) -> None:
            self.recorder.end(opened)
            task.result()
            self.planner.on_trained(fragment.id, self.recorder.now_s())
            self._trained.update(fragment.uids)
            self._trainer_is_free = True

        self._start(self.trainer.accumulate(fragment, groups), on_trained)

    def _start_assist(self, decision: Assist) -> None:
        chunk = decision.chunk
        # the prompt's conditions are published for it, even if none of its samples ever is
        self._published.setdefault(chunk.batch, Published()).groups.setdefault(chunk.uid, {})
        opened = self._begin_chunk("assist", self.lanes.trainer, chunk)
        opened.detail["reason"] = decision.reason
        if decision.predicted_gain_s is not None:
            opened.detail["predicted_gain_s"] = decision.predicted_gain_s

        def on_assisted(task: asyncio.Task[GeneratedChunk]) -> None:
            self.recorder.end(opened)
            generated = task.result()
            del self._chunks[chunk.id]
            self._trainer_is_free = True
            self._on_generated(chunk, generated)

        self._start(self.generator.assist(chunk), on_assisted)

    def _start_commit(self, report: BatchReport) -> None:
        if report.num_groups == 0:
            raise RunStopped(
                f"step {report.batch + 1}: every group was dropped ({dict(report.dropped)}); the last failure was: "
                f"{self.last_failure or 'none, all rewards of each group were equal'}"
            )
        opened = self.recorder.begin("commit", self.lanes.trainer, step=self._step, version=report.batch)

        def on_committed(task: asyncio.Task[dict[str, float]]) -> None:
            self.recorder.end(opened)
            metrics = task.result()
            self._is_open = False
            self.planner.on_committed(report.batch)
            self._outcome = self._make_outcome(report, metrics)

        self._start(self.trainer.commit(), on_committed)

    def _make_outcome(self, report: BatchReport, metrics: dict[str, float]) -> BatchOutcome:
        published = self._published.pop(report.batch)
        unwanted = published.unwanted + [
            SampleName.of(uid, index, tag)
            for uid, tags in published.groups.items()
            if uid not in self._trained
            for index, tag in tags.items()
        ]
        return BatchOutcome(
            report,
            metrics,
            self._slowest_decision_s,
            groups={uid: published.groups[uid] for uid in sorted(self._trained)},
            dropped_uids=sorted({*published.groups, *(name.uid for name in unwanted)} - self._trained),
            unwanted=unwanted,
        )

    # -- events -------------------------------------------------------------------------------------------
    def _start(self, work: Awaitable[Any], handle: Callable[[asyncio.Task[Any]], None]) -> None:
        self._tasks[asyncio.ensure_future(work)] = handle  # type: ignore[index]

    async def _next_events(self, timeout_s: float | None) -> None:
        """Wait until something has ended (or for `timeout_s`), and handle all that has."""
        if not self._tasks:
            raise RunStopped(
                f"step {self._step}: nothing is under way and the batch is not whole; every replica is lost, or the "
                f"prompts ran out. The last failure was: {self.last_failure or 'none'}"
            )
        done, _ = await asyncio.wait(self._tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            self._tasks.pop(task)(task)

    def _wait(self, lane: Lane, reason: Any) -> None:
        """Note that a lane has nothing to do, from now on."""
        opened = self._waiting.get(lane)
        if opened is not None and opened.work.get("reason") == reason and opened.step == self._step:
            return
        self._stop_waiting(lane)
        self._waiting[lane] = self.recorder.begin("wait", lane, step=self._step, reason=reason)

    def _stop_waiting(self, lane: Lane) -> None:
        if lane in self._waiting:
            self.recorder.end(self._waiting.pop(lane))


def _require_success(task: asyncio.Task[None]) -> None:
    task.result()
