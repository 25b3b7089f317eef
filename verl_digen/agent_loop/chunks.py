# SPDX-License-Identifier: Apache-2.0
"""Chunks in an agent loop worker: generated on the replica the planner chose, scored meanwhile, then published.

The driver retries a sample that fails in generation or scoring. If the replica died, it retries the whole chunk:
samples generated until then are dropped. `RunStopped` means that a retry cannot help, and ends the run.

Who waits: the driver for `generate_chunk`, after which the slot is free, and `collect_chunk`; a sample's scoring only
for its generation. Bound: the driver has at most one chunk per slot in generation, and collects every generated chunk.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError

from verl_digen.agent_loop.server_manager import ReplicaClient
from verl_digen.config import DigenConfig
from verl_digen.errors import RunStopped, describe
from verl_digen.reward.sample_rewards import SampleRewards
from verl_digen.sampling.requests import request_id
from verl_digen.schedulers.types import Chunk
from verl_digen.types import GroupTags, PromptRow


@dataclass(frozen=True)
class ChunkOrder:
    """Samples of one group to generate. Written by the trainer's conductor."""

    chunk_id: int
    samples: tuple[int, ...]
    """Sample indices within the group."""
    row: PromptRow
    step: int
    """The optimizer step that the samples are for."""

    @property
    def uid(self) -> str:
        """Its group."""
        return self.row.uid


@dataclass(frozen=True)
class GeneratedChunk:
    """Answer to the driver when a chunk's generation has ended."""

    failures: Mapping[int, str]
    """Sample index -> why it was not generated."""
    is_slot_lost: bool
    """True if the replica's process died."""


@dataclass(frozen=True)
class ScoredChunk:
    """Answer to the driver when a chunk's samples are scored and published."""

    tags: GroupTags
    """Tags of the samples that were published."""
    failures: Mapping[int, str]
    """Sample index -> why it was not scored."""


class ChunkWorker:
    """Mixin of an agent loop worker: what the trainer's conductor calls.

    Example:
        await worker.generate_chunk(order, server)      # GeneratedChunk(failures={}, is_slot_lost=False)
        await worker.collect_chunk(order.chunk_id)      # ScoredChunk(tags={0: {...}, 1: {...}}, failures={})
    """

    digen: DigenConfig
    _burst_of: Any
    _generate: Any
    _finish: Any
    _publish_rows: Any
    _rewards: SampleRewards
    _generating: dict[int, tuple[ChunkOrder, ReplicaClient, Sequence[asyncio.Task[None]]]]
    """Chunk id -> its order, the replica's client, and a task per sample."""
    _scoring: dict[int, tuple[ChunkOrder, dict[int, asyncio.Task[Any]]]]

    async def generate_chunk(self, order: ChunkOrder, server: Any) -> GeneratedChunk:
        """Generate the samples of `order` on the replica `server`; each is scored as soon as it is generated."""
        client = ReplicaClient(server, self.digen, burst=self._burst_of(order))
        scoring: dict[int, asyncio.Task[Any]] = {}
        self._scoring[order.chunk_id] = order, scoring

        async def run(index: int) -> None:
            generated = await self._generate(client, order.row, index, order.step, validate=False)
            if order.chunk_id in self._scoring:  # else discarded
                scoring[index] = self._begin_scoring(order, generated)

        tasks = [asyncio.create_task(run(index)) for index in order.samples]
        self._generating[order.chunk_id] = order, client, tasks
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        del self._generating[order.chunk_id]
        _, errors = _parted(order.samples, outcomes)
        is_lost = any(isinstance(error, RayActorError) for error in errors.values())
        if is_lost:
            await self.discard_chunk(order.chunk_id)
        reasons = {
            index: "it was withdrawn" if isinstance(error, asyncio.CancelledError) else describe(error)
            for index, error in errors.items()
        }
        return GeneratedChunk(reasons, is_lost)

    def _begin_scoring(self, order: ChunkOrder, generated: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self._finish(generated, order.row, order.step, validate=False))

    async def cancel_chunk(self, chunk_id: int) -> None:
        """Cancel the chunk's samples on its replica, so that `generate_chunk` returns soon, and those that wait for an
        environment; once it is generated, its scores, which may wait for samples of their group that are not wanted any
        more."""
        if chunk_id in self._generating:
            order, client, tasks = self._generating[chunk_id]
            abort = client.server.abort_request.remote
            with suppress(RayActorError):  # the samples are lost anyway
                await asyncio.gather(*(abort(request_id(order.uid, index)) for index in order.samples))
            for task in tasks:
                task.cancel()
        elif chunk_id in self._scoring:
            for task in self._scoring[chunk_id][1].values():
                task.cancel()

    async def discard_chunk(self, chunk_id: int) -> None:
        """Drop the chunk: none of its samples is scored or published from now on. No effect for an unknown chunk."""
        order, scoring = self._scoring.pop(chunk_id, (None, {}))
        for task in scoring.values():
            task.cancel()
        if order is not None:
            self._rewards.settled(order.uid, order.samples)

    async def adopt_chunk(self, order: ChunkOrder, parts: Sequence[Any], failure: str = "") -> GeneratedChunk:
        """Take samples of `order` that the trainer's ranks generate, and score them. `parts`: references to lists of
        `Generation`, one per rank that has some, which do not pass through the driver; `failure`: why others are
        missing."""
        scoring = {
            generation.trajectory.facts.sample_index: self._begin_scoring(order, generation)
            for generations in await asyncio.gather(*parts)
            for generation in generations
        }
        self._scoring[order.chunk_id] = order, scoring
        missing = [index for index in order.samples if index not in scoring]
        return GeneratedChunk(dict.fromkeys(missing, failure), is_slot_lost=False)

    async def collect_chunk(self, chunk_id: int) -> ScoredChunk:
        """Wait for the scores of a chunk whose generation has ended; publish the samples that have one. RunStopped if
        scoring a sample raised it, KeyError if the chunk was discarded."""
        order, scoring = self._scoring[chunk_id]
        outcomes = await asyncio.gather(*scoring.values(), return_exceptions=True)
        del self._scoring[chunk_id]
        self._rewards.settled(order.uid, order.samples)
        scored, errors = _parted(scoring, outcomes)
        if scored:
            await self._publish_rows(list(scored.values()), order.step)
        tags = {index: sample.tag for index, sample in scored.items()}
        return ScoredChunk(tags, {index: describe(error) for index, error in errors.items()})


def _parted(indices: Iterable[int], outcomes: Sequence[Any]) -> tuple[dict[int, Any], dict[int, BaseException]]:
    """(sample index -> result, sample index -> error) of these samples' outcomes. Raises the first `RunStopped`."""
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    for index, outcome in zip(indices, outcomes, strict=True):
        if isinstance(outcome, RunStopped):
            raise outcome
        (errors if isinstance(outcome, BaseException) else results)[index] = outcome
    return results, errors


def described(chunk: Chunk, *others: Chunk) -> str:
    """Chunks of one call, for a person."""
    return f"chunk {chunk.id} ({len(chunk.samples)} samples of group {chunk.uid}{', and more' if others else ''})"
