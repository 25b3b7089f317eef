# SPDX-License-Identifier: Apache-2.0
"""The two pools as the conductor sees them; `verl_digen.trainer.pools` implements both over Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from verl_digen.agent_loop.chunks import GeneratedChunk, ScoredChunk
from verl_digen.schedulers.types import Chunk, Fragment
from verl_digen.types import GroupTags


class Generator(Protocol):
    """The generator pool: one chunk at a time per slot, and the agent loops that score and publish."""

    def condition_key(self, chunk: Chunk) -> str:
        """Key under which the conditions of the chunk's prompt are published."""
        ...

    async def generate(self, slot: str, chunk: Chunk) -> GeneratedChunk:
        """Have the slot generate the chunk; returns when generation has ended."""
        ...

    async def cancel(self, chunk: Chunk) -> None:
        """Have the replica drop the chunk that it generates; `generate` returns soon."""
        ...

    async def discard(self, chunk: Chunk) -> None:
        """Drop the chunk, in whatever state it is: none of its samples is published from now on."""
        ...

    async def end_replica(self, slots: Sequence[str]) -> None:
        """Kill the processes of a hung replica, given all of its slots; its devices are free then."""
        ...

    async def assist(self, chunks: Sequence[Chunk]) -> Sequence[GeneratedChunk]:
        """Have the trainer's ranks generate the chunks, of one group each, in one call; returns one answer per chunk
        when generation has ended."""
        ...

    async def collect(self, chunk: Chunk) -> ScoredChunk:
        """Wait until the chunk's samples are scored and published."""
        ...

    async def load(self, slots: Sequence[str]) -> int | None:
        """Have a replica, given all of its slots, load the newest weights -> their version; None if it died."""
        ...


class Trainer(Protocol):
    """The trainer pool."""

    async def begin(self) -> None:
        """Open a logical batch."""
        ...

    async def accumulate(self, fragment: Fragment, groups: Mapping[str, GroupTags]) -> None:
        """Add the gradient of complete groups."""
        ...

    async def commit(self) -> dict[str, float]:
        """Run the optimizer step; returns its metrics."""
        ...

    async def abort(self) -> None:
        """Discard the open logical batch."""
        ...
