# SPDX-License-Identifier: Apache-2.0
"""State of the planner: groups, their chunks in flight, their batches, and queues of groups."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Literal

from verl_digen.schedulers.types import BatchReport, Chunk, DropReason


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
    """Weight version its samples are generated under; None until the first is issued."""
    state: Literal["open", "ready", "training", "trained", "dropped"] = "open"
    rewards: dict[int, float] = field(default_factory=dict)
    """Sample index -> reward; scored samples only."""
    chunks: set[int] = field(default_factory=set)
    """Ids of chunks with samples not scored yet."""

    @property
    def place(self) -> tuple[int, int]:
        """Sort key in every queue: a replacement drawn late still comes before the next batch."""
        return self.batch, self.order


@dataclass(slots=True)
class LiveChunk:
    """A chunk with samples that are not scored yet."""

    chunk: Chunk
    left: set[int]
    generated_s: float | None = None


@dataclass(slots=True)
class ChunkRequest:
    """A chunk that is being generated."""

    chunk: Chunk
    generator: str
    """A slot's id, or TRAINER."""
    since_s: float
    is_cancelled: bool = False
    """True if its result is no longer needed."""


@dataclass(slots=True)
class Batch:
    """One batch: P groups to train, plus surplus and dropped ones."""

    number: int
    counts: BatchReport
    """Counts so far."""
    groups: list[Group] = field(default_factory=list)
    """Groups in the order they were drawn, dropped ones included."""
    ready: list[tuple[int, str]] = field(default_factory=list)
    """Heap of (order, uid)."""
    num_requests: int = 0
    """Number of its chunks that are being generated."""
    num_open: int = 0
    num_training: int = 0
    num_trained: int = 0
    begun: Counter[int] = field(default_factory=Counter)
    """Versions behind -> number of groups begun and not dropped."""
    dropped: Counter[DropReason] = field(default_factory=Counter)

    @property
    def num_complete(self) -> int:
        """Number of groups that are ready, training or trained."""
        return len(self.ready) + self.num_training + self.num_trained

    def num_begun(self, age_versions: int) -> int:
        """Number of groups begun `age_versions` or more behind."""
        return sum(count for age, count in self.begun.items() if age >= age_versions)

    def report(self, group_size: int, *, num_searches: int, prediction_error: float | None) -> BatchReport:
        """Final counts of the batch, and the error of its predicted end."""
        uids = tuple(group.uid for group in self.groups if group.state == "trained")
        return replace(
            self.counts,
            uids=uids,
            num_samples=len(uids) * group_size,
            num_searches=num_searches,
            prediction_error=prediction_error,
            stale_groups={age: count for age, count in sorted(self.begun.items()) if count},
            dropped={reason: self.dropped[reason] for reason in sorted(self.dropped)},
        )


class GroupQueue:
    """Groups with samples left to issue, oldest first: either those not begun, or those begun under one version.

    Lazy: `front` discards a group once it has no samples left, is not open, or is no longer of `version`.
    """

    def __init__(self, version: int | None):
        self._version = version
        self._heap: list[tuple[tuple[int, int], str]] = []

    def push(self, group: Group) -> None:
        """Add a group. Idempotent."""
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
