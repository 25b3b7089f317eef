# SPDX-License-Identifier: Apache-2.0
"""One optimizer step on separate pools: asks the planner what to do next, has it done, tells the planner what happened.

    prompts --> planner <------------------------------ events ------------------------------+
                  |  assign()                                                                 |
                  +--> generator: chunk to a slot ... generated ... scored and published -----+
                  |  next_for_trainer()                                                       |
                  +--> trainer: begin, accumulate(fragment) ..., commit ----------------------+

Nothing here decides: which chunk goes where, when a fragment is ready and when the batch is whole is said by
`verl_digen.schedulers`, which simulates with the same code. Nothing here waits by polling: every event is a task.

| who waits | for whom | bound |
| --- | --- | --- |
| conductor | the next event | one chunk per slot, its scores, one call of the trainer |
| trainer | a ready fragment | the batch |
| slot | the conductor, between two chunks | one round trip |

Invariants (tests/trainer/test_conductor.py)
- A ready fragment trains at once if the trainer is free; a free slot gets the next chunk at once.
- An exception anywhere aborts the open gradient: the model is its last committed state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl_digen.agent_loop.chunks import GeneratedChunk, ScoredChunk
from verl_digen.errors import RunStopped
from verl_digen.observe.timeline import Lane, Recorder
from verl_digen.observe.timeline.recorder import OpenInterval
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.types import BatchReport, Chunk, Commit, Fragment, Generate, LoadWeights, Train, Wait

logger = logging.getLogger(__name__)

Tags = Mapping[int, Mapping[str, Any]]
"""Sample index -> what the agent loop knows of the sample."""


class Generator(Protocol):
    """The generator pool, one chunk at a time per slot."""

    async def generate(self, slot: str, chunk: Chunk) -> GeneratedChunk:
        """Returns when the chunk's generation has ended."""
        ...

    async def collect(self, chunk: Chunk) -> ScoredChunk:
        """Returns when the chunk's samples are scored and published."""
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
    groups: Mapping[str, Tags]
    """uid -> the samples that were trained."""
    unwanted: Mapping[str, Tags]
    """uid -> samples that were published for nothing: their group was dropped."""


@dataclass(frozen=True)
class Lanes:
    """Whom the timeline knows."""

    trainer: Lane
    reward: Lane
    slots: Mapping[str, Lane]
    """Slot -> its replica."""


class Conductor:
    """Args:
    planner: decides.
    draw_prompts: takes so many prompts for a batch; returns their uids.
    recorder, lanes: where and as whom to note who did what.
    """

    def __init__(
        self,
        planner: BatchPlanner,
        generator: Generator,
        trainer: Trainer,
        draw_prompts: Callable[[int, int], Sequence[str]],
        *,
        recorder: Recorder,
        lanes: Lanes,
    ):
        self.planner, self.generator, self.trainer, self.draw_prompts = planner, generator, trainer, draw_prompts
        self.recorder, self.lanes = recorder, lanes
        self.last_failure = ""
        """Why the sample that failed last did."""
        self._tasks: dict[asyncio.Task[Any], Callable[[asyncio.Task[Any]], None]] = {}
        """What is under way -> what to do with its outcome."""
        self._trainer_is_free = True
        self._report: BatchReport | None = None
        """Of the batch under way, once it is whole."""
        self._trained: set[str] = set()
        self._tags: dict[int, dict[str, dict[int, Mapping[str, Any]]]] = {}
        """Batch -> uid -> sample index -> tag."""
        self._waiting: dict[Lane, OpenInterval] = {}

    async def run_batch(self) -> BatchOutcome:
        """Generate, score and train one logical batch, up to its commit.

        Raises:
            RunStopped: every group of it was dropped. Any exception of the pools; the open gradient is forgotten.
        """
        self._report, self._trained = None, set()
        await self.trainer.begin()
        try:
            while self._report is None:
                self._feed()
                timeout_s = self._engage_trainer() if self._trainer_is_free else None
                if self._report is None:
                    await self._next_events(timeout_s)
            report = self._report
            if report.num_groups == 0:
                raise RunStopped(
                    f"step {report.batch + 1}: every group was dropped ({dict(report.dropped)}); the last failure was: "
                    f"{self.last_failure or 'none, all rewards of each group were equal'}"
                )
            with self.recorder.interval("commit", self.lanes.trainer, step=self._step, version=report.batch):
                metrics = await self.trainer.commit()
        except BaseException:
            await self.trainer.abort()
            raise
        self.planner.on_committed(report.batch)
        self._trainer_is_free = True
        return self._outcome(report, metrics)

    def _outcome(self, report: BatchReport, metrics: dict[str, float]) -> BatchOutcome:
        groups: dict[str, Tags] = {}
        unwanted: dict[str, Tags] = {}
        for batch in [batch for batch in self._tags if batch <= report.batch]:
            for uid, tags in sorted(self._tags.pop(batch).items()):
                (groups if uid in self._trained else unwanted)[uid] = tags
        return BatchOutcome(report, metrics, groups, unwanted)

    def publish(self, version: int) -> None:
        """Every replica has `version` now."""
        self.planner.on_published(version)

    # -- deciding -----------------------------------------------------------------------------------------
    @property
    def _step(self) -> int:
        """The optimizer step under way; the first is 1."""
        return self.planner.batch + 1

    def _feed(self) -> None:
        """Prompts to the planner, chunks to free slots."""
        for batch, count in self.planner.prompts_wanted().items():
            self.planner.on_prompts(batch, self.draw_prompts(batch, count))
        decisions = self.planner.assign(self.recorder.now_s())
        for decision in decisions:
            if isinstance(decision, LoadWeights):  # it has them already: weights go to all replicas at once
                self.planner.on_loaded(decision.slot, decision.version)
            else:
                self._start_chunk(decision)
        if any(isinstance(decision, LoadWeights) for decision in decisions):
            self._feed()

    def _start_chunk(self, decision: Generate) -> None:
        slot, chunk = decision
        self._stop_waiting(self.lanes.slots[slot])
        opened = self.recorder.begin(
            "generate",
            self.lanes.slots[slot],
            step=chunk.batch + 1,
            version=chunk.version,
            chunk_id=chunk.id,
            group_ids=(chunk.uid,),
            num_samples=len(chunk.samples),
        )

        def on_generated(task: asyncio.Task[GeneratedChunk]) -> None:
            self.recorder.end(opened)
            self._on_generated(slot, chunk, task.result())

        self._start(self.generator.generate(slot, chunk), on_generated)

    def _on_generated(self, slot: str, chunk: Chunk, generated: GeneratedChunk) -> None:
        if generated.is_slot_lost:
            logger.warning("slot %s is lost; its %d samples go to others", slot, len(chunk.samples))
            self.planner.on_slot_lost(slot)
            return
        self.planner.on_generated(chunk.id, self.recorder.now_s())
        if generated.failures:
            self._on_failed(chunk, generated.failures)
        self._wait(self.lanes.slots[slot], "no_chunk_left")
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
        for index, tag in scored.tags.items():
            if tag["min_global_steps"] != tag["max_global_steps"]:
                raise RuntimeError(
                    f"sample {index} of group {chunk.uid} was generated under weight versions "
                    f"{tag['min_global_steps']} and {tag['max_global_steps']}; it must be one"
                )
            self._tags.setdefault(chunk.batch, {}).setdefault(chunk.uid, {})[index] = tag
            self.planner.on_scored(chunk.id, {index: tag["reward"]}, tag["min_global_steps"], self.recorder.now_s())

    def _on_failed(self, chunk: Chunk, failures: Mapping[int, str]) -> None:
        self.last_failure = next(iter(failures.values()))
        logger.warning("%d samples of group %s failed: %s", len(failures), chunk.uid, self.last_failure)
        self.planner.on_failed(chunk.id, list(failures))

    def _engage_trainer(self) -> float | None:
        """Have the trainer, which is free, do what the planner says -> seconds after which to ask again, if any."""
        decision = self.planner.next_for_trainer(self.recorder.now_s())
        if isinstance(decision, Wait):
            self._wait(self.lanes.trainer, decision.reason)
            return decision.predicted_wait_s
        self._stop_waiting(self.lanes.trainer)
        self._trainer_is_free = False
        if isinstance(decision, Commit):
            self._report = decision.report
        elif isinstance(decision, Train):
            self._start_training(decision.fragment)
        else:
            raise RuntimeError(f"the trainer cannot do {decision} in this loop")
        return None

    def _start_training(self, fragment: Fragment) -> None:
        groups = {uid: self._tags[fragment.batch][uid] for uid in fragment.uids}
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
        self._stop_waiting(lane)
        self._waiting[lane] = self.recorder.begin("wait", lane, step=self._step, reason=reason)

    def _stop_waiting(self, lane: Lane) -> None:
        if lane in self._waiting:
            self.recorder.end(self._waiting.pop(lane))
