# SPDX-License-Identifier: Apache-2.0
"""What the planner remembers: groups, their chunks on the way, the batches they belong to, and queues of groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from verl_digen.schedulers.types import BatchReport, Chunk, DropReason

GroupState = Literal["open", "ready", "training", "trained", "dropped"]


@dataclass(slots=True)
class Group:
    """The samples of one prompt."""

    uid: str
    batch: int
    order: int
    """Position among all groups ever drawn."""
    unissued: list[int]
    """Sample indices, ascending."""
    version: int | None = None
    """What its samples are generated under; None until the first is issued."""
    state: GroupState = "open"
    rewards: dict[int, float] = field(default_factory=dict)
    """Sample index -> reward, of the samples that are scored."""
    chunks: set[int] = field(default_factory=set)
    """Chunks with samples not scored yet."""

    @property
    def place(self) -> tuple[int, int]:
        """Its place in every queue: a replacement drawn late still comes before the next batch."""
        return self.batch, self.order


@dataclass(slots=True)
class LiveChunk:
    """A chunk with samples that are not scored yet."""

    chunk: Chunk
    left: set[int]
    generated_s: float | None = None


@dataclass(slots=True)
class Request:
    """A chunk that is being generated."""

    chunk: Chunk
    generator: str
    """A slot's id, or TRAINER."""
    since_s: float
    is_cancelled: bool = False
    """Nobody wants it any more."""


@dataclass(slots=True)
class Batch:
    """P groups, or a few more on the way there."""

    number: int
    groups: list[Group] = field(default_factory=list)
    """In the order they were drawn."""
    ready: list[tuple[int, str]] = field(default_factory=list)
    """Heap of (order, uid)."""
    num_requests: int = 0
    """Its chunks that are being generated."""
    num_open: int = 0
    num_training: int = 0
    num_trained: int = 0
    num_fragments: int = 0
    num_assists: int = 0
    num_assisted: int = 0
    num_group_refills: int = 0
    num_sample_refills: int = 0
    num_reissued: int = 0
    num_late: int = 0
    begun: Counter[int] = field(default_factory=Counter)
    """Versions behind -> groups begun and not dropped."""
    dropped: Counter[DropReason] = field(default_factory=Counter)

    @property
    def num_complete(self) -> int:
        """Groups that are ready, training or trained."""
        return len(self.ready) + self.num_training + self.num_trained

    def num_begun(self, age_versions: int) -> int:
        """Groups begun that many versions behind or more."""
        return sum(count for age, count in self.begun.items() if age >= age_versions)

    def report(self, group_size: int, *, num_searches: int, prediction_error: float | None) -> BatchReport:
        """Its counts, at the end, and how well that end was foreseen."""
        return BatchReport(
            batch=self.number,
            num_groups=self.num_trained,
            num_samples=self.num_trained * group_size,
            num_fragments=self.num_fragments,
            num_assists=self.num_assists,
            num_assisted=self.num_assisted,
            num_searches=num_searches,
            prediction_error=prediction_error,
            stale_groups={age: count for age, count in sorted(self.begun.items()) if count},
            dropped={reason: self.dropped[reason] for reason in sorted(self.dropped)},
            num_group_refills=self.num_group_refills,
            num_sample_refills=self.num_sample_refills,
            num_reissued=self.num_reissued,
            num_late=self.num_late,
        )


class GroupQueue:
    """Groups with samples left to issue, oldest first: those not begun, or those begun under one version.

    Lazy: a group leaves by itself once it has no samples left, is not open, or is no longer of `version`.
    """

    def __init__(self, version: int | None):
        self._version = version
        self._heap: list[tuple[tuple[int, int], str]] = []

    def push(self, group: Group) -> None:
        """Add a group; twice does no harm."""
        heappush(self._heap, (group.place, group.uid))

    def front(self, groups: Mapping[str, Group]) -> Group | None:
        """The oldest group; None if there is none."""
        while self._heap:
            place, uid = self._heap[0]
            group = groups.get(uid)
            if group is not None and group.place == place and group.version == self._version and group.unissued:
                return group
            heappop(self._heap)
        return None
