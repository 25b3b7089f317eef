# SPDX-License-Identifier: Apache-2.0
"""Faults as data: a call of a process, and the outcome of the call. A plan of faults is drawn from a seed.

Every remote call of a run is one of `CALLS`; every kind is possible at every one of them, except for those that
`is_possible` excludes. `survival` defines whether a run may end because of a fault.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The outcome of a call."""

    DIES_BEFORE = "dies before"
    """The process dies instead of doing it."""
    DIES_AFTER = "dies after"
    """The process does it and dies; the answer is lost."""
    AWAY_BEFORE = "away before"
    """`ActorUnavailableError`, and it was not done; the process lives."""
    AWAY_AFTER = "away after"
    """`ActorUnavailableError`, and it was done; the process lives."""
    HANGS = "hangs"
    """The process stops: neither this call nor any later one is answered, until it is killed."""
    SLOW = "slow"
    """Much longer than anything else, on the way there and back."""
    TWICE = "twice"
    """Done twice, as by Ray when an answer got lost; the second answer counts."""
    RAISES = "raises"
    """It raises something: out of memory, a disk that is full."""

    def __repr__(self) -> str:
        """Source text, as it is written in a test."""
        return f"Kind.{self.name}"


SERVER, ENGINE, AGENT, REWARD, RANK, QUEUE = "server", "engine", "agent", "reward", "rank", "queue"
"""Kinds of processes: servers of replicas, their checkpoint engines' workers, agent loop workers, reward workers,
trainer ranks, TransferQueue. A process is named by its kind and a number; a replica's two have the same number."""

CALLS: dict[str, tuple[str, ...]] = {
    SERVER: (
        "generate_all",
        "abort_request",
        "encode",
        "activate_weights",
        "begin_update",
        "seal_update",
        "check_health",
        "__ray_ready__",
    ),
    ENGINE: ("update_weights", "__ray_ready__"),
    AGENT: (
        "generate_chunk",
        "cancel_chunk",
        "discard_chunk",
        "prepare_assist",
        "adopt_chunk",
        "collect_chunk",
        "validate",
        "__ray_ready__",
    ),
    REWARD: ("score", "__ray_ready__"),
    RANK: ("begin", "accumulate", "commit", "abort", "assist", "update_weights"),
    QUEUE: ("put", "clear", "list", "__ray_ready__"),
}
"""Kind of process -> its methods that others call."""

KINDS = tuple(Kind)

WEIGHTS = {SERVER: 6, ENGINE: 2, AGENT: 1, REWARD: 3, RANK: 1, QUEUE: 1}
"""Weight of a kind of process in the draw. Kinds whose faults end the run are rarer: nothing is learnt afterwards."""


@dataclass(frozen=True)
class Fault:
    """Example: Fault("server 1", "generate_all", 2, Kind.DIES_AFTER) strikes the third generation asked of server 1."""

    process: str
    method: str
    call: int
    """Number of the call among those of this method, from 0."""
    kind: Kind

    def __repr__(self) -> str:
        """Source text, as it is written in a test."""
        return f"Fault({self.process!r}, {self.method!r}, {self.call}, {self.kind!r})"

    @property
    def process_kind(self) -> str:
        """ "server", "engine" and so on."""
        return self.process.split()[0]


def is_possible(process_kind: str, method: str, kind: Kind) -> bool:
    """True if a call can have this fault. Ray retries calls of a process that it may restart, and clients of
    TransferQueue retry theirs; a heartbeat is Ray's own method, which raises nothing."""
    if kind is Kind.TWICE:
        return process_kind in (REWARD, QUEUE)
    return kind is not Kind.RAISES or method != "__ray_ready__"


def draw_faults(rng: random.Random, processes: Sequence[str], kinds: Sequence[Kind]) -> tuple[Fault, ...]:
    """Draw no fault, one, or a few; at first calls more often than at late ones, which may never come."""
    count = rng.choice((0, 1, 1, 2, 2, 3, 4, 6))
    weights = [WEIGHTS[name.split()[0]] for name in processes]
    faults: dict[tuple[str, str, int], Fault] = {}
    for process in rng.choices(processes, weights, k=count):
        process_kind = process.split()[0]
        method = rng.choice(CALLS[process_kind])
        call = int(rng.expovariate(1 / 4))
        kind = rng.choice([kind for kind in kinds if is_possible(process_kind, method, kind)])
        faults[process, method, call] = Fault(process, method, call, kind)
    return tuple(faults.values())
