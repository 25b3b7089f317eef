# SPDX-License-Identifier: Apache-2.0
"""The device pools as the conductor sees them: Ray handles behind its two protocols, and nothing that decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_digen.agent_loop.chunks import ChunkOrder, GeneratedChunk, ScoredChunk
from verl_digen.engine.fragment import Fragment as EngineFragment
from verl_digen.engine.fragment import FragmentSample
from verl_digen.schedulers.types import Chunk, Fragment

PARTITION = "train"
"""Of TransferQueue: where samples' rows wait for the trainer."""


@dataclass(frozen=True)
class Slot:
    """A place where a replica works on one chunk at a time."""

    name: str
    replica: str
    server: Any
    """Handle of the replica's server."""


class GeneratorPool:
    """Agent loop workers in front of replicas.

    Args:
        workers: handles of `DiffusionAgentLoopWorker`; a chunk stays with one of them.
    """

    def __init__(self, workers: Sequence[Any], slots: Sequence[Slot]):
        self._workers = list(workers)
        self._slots = {slot.name: slot for slot in slots}
        self._rows: dict[int, dict[str, Mapping[str, Any]]] = {}
        """Batch -> uid -> row."""

    def add_prompt(self, batch: int, uid: str, row: Mapping[str, Any]) -> None:
        """What the agent loop needs of a prompt."""
        self._rows.setdefault(batch, {})[uid] = row

    def forget_batch(self, batch: int) -> None:
        """Its prompts are trained or dropped."""
        del self._rows[batch]

    async def generate(self, slot: str, chunk: Chunk) -> GeneratedChunk:
        order = ChunkOrder(chunk.id, chunk.uid, chunk.samples, self._rows[chunk.batch][chunk.uid])
        return await self._worker(chunk).generate_chunk.remote(order, self._slots[slot].server)

    async def collect(self, chunk: Chunk) -> ScoredChunk:
        return await self._worker(chunk).collect_chunk.remote(chunk.id)

    def _worker(self, chunk: Chunk) -> Any:
        return self._workers[chunk.id % len(self._workers)]


class TrainerPool:
    """The trainer's ranks, which are called alike.

    Args:
        worker_group: verl's, of `DiffusionWorker`.
        num_samples: of a logical batch.
        num_rows: of a logical batch, as planned.
    """

    def __init__(self, worker_group: Any, *, num_samples: int, num_rows: int):
        self._worker_group = worker_group
        self._num_samples = num_samples
        self._num_rows = num_rows
        self.compute_s = 0.0
        """Time the ranks spent in calls of the open batch."""

    async def begin(self) -> None:
        self.compute_s = 0.0
        self._worker_group.begin(self._num_samples, self._num_rows, PARTITION)

    async def accumulate(self, fragment: Fragment, groups: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
        samples = tuple(
            FragmentSample(sample_key(uid, index), uid, tag["reward"], tag["num_steps"], tag["experts"])
            for uid, tags in groups.items()
            for index, tag in sorted(tags.items())
        )
        counts = await self._on_all(self._worker_group.accumulate(EngineFragment(f"f{fragment.id}", samples)))
        self.compute_s += counts["accumulate_s"]

    async def commit(self) -> dict[str, float]:
        started_s = time.perf_counter()
        metrics = await self._on_all(self._worker_group.commit())
        self.compute_s += time.perf_counter() - started_s
        return metrics

    async def abort(self) -> None:
        self._worker_group.abort()

    async def _on_all(self, references: Sequence[Any]) -> dict[str, float]:
        """Wait for every rank; the first one's answer."""
        return (await asyncio.gather(*references))[0]


def sample_key(uid: str, sample_index: int) -> str:
    """A sample's key in TransferQueue."""
    return f"{uid}_{sample_index}_0"
