# SPDX-License-Identifier: Apache-2.0
"""Chunks in an agent loop worker: generated on the replica the planner chose, scored meanwhile, then published.

The driver retries a sample that fails in generation or scoring. If the replica died, it retries the whole chunk:
samples generated until then are dropped. `RunStopped` means that a retry cannot help, and ends the run.

Who waits: the driver for `generate`, after which the slot is free, and `collect`; a sample's scoring only for its
generation. Bound: the driver has at most one chunk per slot in generation, and collects every generated chunk.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError

from verl_digen.errors import RunStopped, describe
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


class ChunkRunner:
    """Chunks of one `worker`, which generates, withdraws, scores and publishes their samples.

    Example:
        runner = ChunkRunner(worker)
        await runner.generate(order, client)    # GeneratedChunk(failures={}, is_slot_lost=False)
        await runner.collect(order.chunk_id)    # ScoredChunk(tags={0: {...}, 1: {...}}, failures={})
    """

    def __init__(self, worker: Any):
        self._worker = worker
        self._generating: dict[int, tuple[ChunkOrder, Any, Sequence[asyncio.Task[None]]]] = {}
        """Chunk id -> its order, the replica's client, and a task per sample."""
        self._scoring: dict[int, tuple[ChunkOrder, dict[int, asyncio.Task[Any]]]] = {}

    async def generate(self, order: ChunkOrder, client: Any) -> GeneratedChunk:
        """Generate the samples of `order` concurrently by `client`; each is scored as soon as it is generated."""
        scoring: dict[int, asyncio.Task[Any]] = {}
        self._scoring[order.chunk_id] = order, scoring

        async def run(index: int) -> None:
            generated = await self._worker.generate_sample(order, index, client)
            if order.chunk_id in self._scoring:  # else discarded
                scoring[index] = asyncio.create_task(self._worker.score_sample(order, generated))

        tasks = [asyncio.create_task(run(index)) for index in order.samples]
        self._generating[order.chunk_id] = order, client, tasks
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        del self._generating[order.chunk_id]
        _, errors = _parted(order.samples, outcomes)
        is_lost = any(isinstance(error, RayActorError) for error in errors.values())
        if is_lost:
            self.discard(order.chunk_id)
        return GeneratedChunk({index: _reason(error) for index, error in errors.items()}, is_lost)

    async def cancel(self, chunk_id: int) -> None:
        """Cancel the chunk's samples on its replica, so that `generate` returns soon, and those that wait for an
        environment; once it is generated, its scores, which may wait for samples of their group that are not wanted any
        more."""
        if chunk_id in self._generating:
            order, client, tasks = self._generating[chunk_id]
            await asyncio.gather(*(self._worker.withdraw_sample(order, index, client) for index in order.samples))
            for task in tasks:
                task.cancel()
        elif chunk_id in self._scoring:
            for task in self._scoring[chunk_id][1].values():
                task.cancel()

    def discard(self, chunk_id: int) -> None:
        """Drop the chunk: none of its samples is scored or published from now on. No effect for an unknown chunk."""
        order, scoring = self._scoring.pop(chunk_id, (None, {}))
        for task in scoring.values():
            task.cancel()
        if order is not None:
            self._worker.on_settled(order)

    def adopt(self, order: ChunkOrder, generated: Mapping[int, Any], failure: str = "") -> GeneratedChunk:
        """Take samples of `order` that were generated elsewhere, and score them; `failure`: why others are missing."""
        scoring = {
            index: asyncio.create_task(self._worker.score_sample(order, sample)) for index, sample in generated.items()
        }
        self._scoring[order.chunk_id] = order, scoring
        missing = [index for index in order.samples if index not in generated]
        return GeneratedChunk(dict.fromkeys(missing, failure), is_slot_lost=False)

    async def collect(self, chunk_id: int) -> ScoredChunk:
        """Wait for the scores of a chunk whose generation has ended; publish the samples that have one. RunStopped if
        scoring a sample raised it, KeyError if the chunk was discarded."""
        order, scoring = self._scoring[chunk_id]
        outcomes = await asyncio.gather(*scoring.values(), return_exceptions=True)
        del self._scoring[chunk_id]
        self._worker.on_settled(order)
        scored, errors = _parted(scoring, outcomes)
        tags = await self._worker.publish_chunk(order, scored) if scored else {}
        return ScoredChunk(tags, {index: describe(error) for index, error in errors.items()})


def _reason(error: BaseException) -> str:
    """Why a sample was not generated."""
    return "it was withdrawn" if isinstance(error, asyncio.CancelledError) else describe(error)


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
