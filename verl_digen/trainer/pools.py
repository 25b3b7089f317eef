# SPDX-License-Identifier: Apache-2.0
"""The device pools as the conductor sees them: Ray handles, and no decisions; and the slots of the replicas."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

from ray.exceptions import RayActorError

from verl_digen.agent_loop.chunks import ChunkOrder, GeneratedChunk, ScoredChunk
from verl_digen.algorithms.objectives import Select
from verl_digen.algorithms.rows import numbers
from verl_digen.engine.fragment import FragmentSpec
from verl_digen.errors import DeadlineMissed, ReplicasLost, describe
from verl_digen.observe.timeline.recorder import Recorder
from verl_digen.processes.actors import retried
from verl_digen.processes.calls import CallsUnderWay
from verl_digen.processes.deadlines import Deadlines, DeadlinesConfig
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.types import Chunk, Fragment
from verl_digen.trainer.timelines import IdleLanes, Joining
from verl_digen.trainer.updates import GroupRewards, TrainerRanks, fragment_samples, totals
from verl_digen.types import GroupTags, PromptRow, SampleRequest

logger = logging.getLogger(__name__)


class GeneratorPool:
    """Agent loop workers in front of replicas, and in front of the trainer's ranks when those assist.

    `end_replica` kills the processes of a hung replica, whose devices are free then; `condition_key` is the key of a
    prompt's conditions.
    """

    def __init__(
        self,
        workers: Sequence[Any],
        trainer: TrainerRanks,
        *,
        end_replica: Callable[[Joining], Awaitable[None]],
        condition_key: Callable[[PromptRow], str],
        deadlines: DeadlinesConfig,
    ):
        self._workers = list(workers)
        self.end_replica, self._deadlines = end_replica, deadlines
        self.replicas: dict[str, Joining] = {}
        """Slot -> its replica. A lost one stays: a call that has begun meanwhile reports the loss itself."""
        self._living: list[Joining] = []
        self._trainer, self._condition_key = trainer, condition_key
        self._rows: dict[int, dict[str, PromptRow]] = {}
        """Batch -> uid -> prompt."""
        self._encoded: set[str] = set()
        """Prompts whose conditions were published for an assist."""

    def add_prompt(self, batch: int, row: PromptRow) -> None:
        """Register a drawn prompt of a batch."""
        self._rows.setdefault(batch, {})[row.uid] = row

    def open_prompts(self) -> list[PromptRow]:
        """Prompts of unfinished batches, in order."""
        return [row for batch in sorted(self._rows) for row in self._rows[batch].values()]

    def condition_key(self, chunk: Chunk) -> str:
        """Key under which the conditions of the chunk's prompt are published."""
        return self._condition_key(self._rows[chunk.batch][chunk.uid])

    def condition_keys(self) -> set[str]:
        """Keys of the conditions that unfinished batches need."""
        return {self._condition_key(row) for row in self.open_prompts()}

    def forget_batch(self, batch: int) -> None:
        """Forget the prompts of a batch; all are trained or dropped."""
        self._encoded.difference_update(self._rows.pop(batch))

    async def generate(self, slot: str, chunk: Chunk) -> GeneratedChunk:
        """Have the slot generate the chunk; returns when generation has ended."""
        return await self._worker(chunk).generate_chunk.remote(self._order(chunk), self.replicas[slot].server)

    async def cancel(self, chunk: Chunk) -> None:
        """Have the replica drop the chunk that it generates; `generate` returns soon."""
        await self._worker(chunk).cancel_chunk.remote(chunk.id)

    async def discard(self, chunk: Chunk) -> None:
        """Drop the chunk, in whatever state it is: none of its samples is published from now on."""
        await self._worker(chunk).discard_chunk.remote(chunk.id)

    def join(self, replica: Joining) -> None:
        """Add the slots of a replica."""
        self.replicas |= dict.fromkeys(replica.slots, replica)
        self._living.append(replica)

    def leave(self, replica: Joining) -> None:
        """Have a replica encode no further prompts; no effect if it has left already."""
        self._living = [one for one in self._living if one is not replica]

    async def assist(self, chunks: Sequence[Chunk]) -> Sequence[GeneratedChunk]:
        """Have the trainer's ranks generate the chunks, of one group each, in one call; returns one answer per chunk
        when generation has ended."""
        prepared = await asyncio.gather(*map(self._prepare_assist, chunks, itertools.count()))
        requests = [request for made, _ in prepared for request in made]
        # of each rank: (uid, reference to its samples of the group); samples do not pass through the driver
        answers = await self._trainer.assist(requests, chunks[0].version) if requests else []

        async def adopt(chunk: Chunk, failure: str) -> GeneratedChunk:
            parts = [part for answer in answers for uid, part in answer if uid == chunk.uid]
            return await self._worker(chunk).adopt_chunk.remote(self._order(chunk), parts, failure)

        return await asyncio.gather(
            *(adopt(chunk, failure) for chunk, (_, failure) in zip(chunks, prepared, strict=True))
        )

    async def _prepare_assist(self, chunk: Chunk, number: int) -> tuple[Sequence[SampleRequest], str]:
        """Requests of the chunk that the ranks are to generate, or none and the reason: the encoder refuses the prompt,
        or every replica died just now. A replica encodes it, the first time; each chunk of an assist, by its number,
        asks another replica first."""
        order, worker = self._order(chunk), self._worker(chunk)
        if chunk.uid in self._encoded:
            return await worker.prepare_assist.remote(order, None), ""
        first = number % max(1, len(self._living))
        for one in self._living[first:] + self._living[:first]:
            asked = worker.prepare_assist.remote(order, one.server)
            try:
                requests = await asyncio.wait_for(asked, self._deadlines.answer_s)
            except (RayActorError, asyncio.TimeoutError) as error:
                logger.warning("replica %s does not encode a prompt, another one is asked: %r", one.replica, error)
            except ValueError as error:
                return (), describe(error)
            else:
                self._encoded.add(chunk.uid)
                return requests, ""
        return (), describe(ReplicasLost())

    async def load(self, slots: Sequence[str]) -> int | None:
        """Have a replica, given all of its slots, load the newest weights -> their version; None if it died."""
        try:
            return await retried(self.replicas[slots[0]].server.activate_weights.remote, self._deadlines.blip_s)
        except RayActorError as error:
            logger.warning("the replica of slot %s takes no weights any more: %s", slots[0], error)
            return None

    def _order(self, chunk: Chunk) -> ChunkOrder:
        return ChunkOrder(chunk.id, chunk.samples, self._rows[chunk.batch][chunk.uid], step=chunk.batch + 1)

    async def collect(self, chunk: Chunk) -> ScoredChunk:
        """Wait until the chunk's samples are scored and published."""
        return await self._worker(chunk).collect_chunk.remote(chunk.id)

    def _worker(self, chunk: Chunk) -> Any:
        """One worker has all chunks of a group: it collects the group for rewards that compare its samples."""
        return self._workers[crc32(chunk.uid.encode()) % len(self._workers)]


class TrainerPool:
    """The trainer's ranks, for the conductor, which opens batches of at most `num_samples` samples, with `num_rows`
    rows planned."""

    def __init__(
        self, ranks: TrainerRanks, *, num_samples: int, num_rows: int, select: Select, rewards_of: GroupRewards = totals
    ):
        self._ranks, self._num_samples, self._num_rows = ranks, num_samples, num_rows
        self._select, self._rewards_of = select, rewards_of

    async def begin(self) -> None:
        """Open a logical batch."""
        self._ranks.compute_s = 0.0
        await self._ranks.begin(self._num_samples, self._num_rows)

    async def accumulate(self, fragment: Fragment, groups: Mapping[str, GroupTags]) -> None:
        """Add the gradient of complete groups."""
        samples = fragment_samples(groups, self._select, self._rewards_of)
        await self._ranks.accumulate(FragmentSpec(f"f{fragment.id}", samples))

    async def commit(self) -> dict[str, float]:
        """Run the optimizer step; returns its metrics."""
        return numbers(await self._ranks.commit())

    async def abort(self) -> None:
        """Discard the open logical batch."""
        await self._ranks.abort()


class ReplicaSlots:
    """Slots and their replicas: new weights between two chunks, and replicas that are lost, given up, or join. `go_on`
    is called after a change of the plan that no caller knows of."""

    def __init__(
        self,
        planner: BatchPlanner,
        generator: GeneratorPool,
        calls: CallsUnderWay,
        deadlines: Deadlines,
        recorder: Recorder,
        idle: IdleLanes,
        *,
        go_on: Callable[[], None],
    ):
        self._planner, self._generator, self._calls, self._deadlines = planner, generator, calls, deadlines
        self._recorder, self._idle, self._go_on = recorder, idle, go_on
        self._unloaded: set[str] = set()
        """Slots that wait for the other slots of their replica before it loads new weights."""

    def join(self, replica: Joining, version: int) -> None:
        """Add the slots of a replica that has `version`."""
        self._idle.stop(replica.lane)
        self._generator.join(replica)
        for slot in replica.slots:
            self._planner.on_slot_joined(slot, replica=replica.replica, version=version)

    def unload(self, slot: str) -> None:
        """Mark the slot ready for new weights; its replica loads them when all of its slots are ready."""
        self._unloaded.add(slot)
        slots = [other for other in self._generator.replicas[slot].slots if self._planner.has_slot(other)]
        if self._unloaded.issuperset(slots):
            self._unloaded.difference_update(slots)
            self._calls.spawn(self._load(slots))

    async def _load(self, slots: Sequence[str]) -> None:
        """Have the replica of these slots load the newest weights."""
        slot, newest = slots[0], self._planner.published
        lane = self._generator.replicas[slot].lane
        self._idle.stop(lane)
        try:
            with self._recorder.interval("publish", lane, step=newest, version=newest):
                what, bound = f"loading version {newest} on slot {slot}", self._deadlines.bound("load", slot)
                version, took_s = await self._calls.call(self._generator.load(slots), what=what, bound=bound)
        except DeadlineMissed as error:
            self.give_up(slot, error)
        else:
            if version is None:
                self.lose(slot)
            else:
                self._deadlines.observe("load", slot, seconds=took_s)
                for loaded in slots:
                    if self._planner.has_slot(loaded):  # else reported lost while it loaded
                        self._planner.on_loaded(loaded, version)
        self._go_on()

    def give_up(self, slot: str, error: DeadlineMissed) -> None:
        """Drop a hung replica and kill its processes."""
        logger.error("the replica of slot %s is given up: %s", slot, error)
        self.lose(slot)
        ending = self._generator.end_replica(self._generator.replicas[slot])
        self._calls.tell(ending, f"ending the replica of slot {slot}")

    def lose(self, slot: str) -> None:
        """Take all slots of a dead replica out of the plan. No effect on slots that are out already."""
        self._generator.leave(self._generator.replicas[slot])
        for lost in self._generator.replicas[slot].slots:
            self._unloaded.discard(lost)
            if self._planner.has_slot(lost):
                logger.warning("slot %s is lost; the samples it was generating go to others", lost)
                self._planner.on_slot_lost(lost)
                self._idle.wait(self._generator.replicas[lost].lane, "slot_lost", self._planner.batch + 1)
