# SPDX-License-Identifier: Apache-2.0
"""Timeouts of calls: learnt from the durations measured so far, with a floor.

    bound = max(FLOOR_s, factor x predicted)      once the same callee has answered a call of that kind
    bound = max(FLOOR_s, first_s)                 before: it compiles, fills caches, opens connections

The prediction is a fixed part plus a part per item (samples, groups), learnt over all callees of a kind. A score that
compares the samples of a group waits for all of them: its bound is longer by the bound of a first generation, so that a
sample whose replica hangs is generated again before those that wait for it are given up.

Invariant (tests/processes/test_deadlines.py): a call that takes at most `factor` times as long as predicted is never
overdue.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from verl_digen.require import In, Section
from verl_digen.schedulers.durations import RunningLine

CallKind = Literal["generate", "assist", "score", "train", "commit", "load", "publish", "answer", "files"]
"""Kinds of calls to a replica, the trainer or an agent loop worker. "answer": any call without work; "files": a
checkpoint, whose bound is not learnt."""

FLOORS: dict[CallKind, str] = {
    **dict.fromkeys(("generate", "load", "answer"), "answer_s"),
    **dict.fromkeys(("assist", "train", "commit", "publish"), "train_s"),
    "files": "setup_s",
}
"""Kind -> field of `DeadlinesConfig` with its minimum timeout; a score's comes from `digen.reward`."""

Seconds = Annotated[float, In("(0, inf)"), "give a large number"]


@dataclass(frozen=True)
class DeadlinesConfig(Section, key="digen.deadlines"):
    """Timeouts in seconds. An overdue replica counts as lost and is restarted; an overdue trainer or agent loop worker
    ends the run, and the message names the key to raise.

    The defaults suit networks of tens of GB and training calls of minutes; smaller values detect a hang sooner.
    """

    factor: Annotated[float, In("[1, inf)")] = 5.0
    """A call may take at most `factor` times the duration predicted from earlier calls of its kind."""
    first_s: Seconds = 3600.0
    """Minimum timeout of the first call of each kind to a replica or the trainer, which compiles and fills caches.
    Timeout of restarting a lost replica and of waking timeshared rewards."""
    answer_s: Seconds = 120.0
    """Minimum timeout of a replica's call: a chunk, a validation sample, the switch to received weights. Timeout of a
    call without work, such as a health check, of encoding a prompt for the trainer, and of discarding a failed step's
    gradient. An unreachable replica is retried for a quarter of it."""
    train_s: Seconds = 1200.0
    """Minimum timeout of a trainer's call: the gradient of a fragment or a colocated batch, a chunk that it generates,
    the optimizer step, sending weights to all replicas."""
    setup_s: Seconds = 14400.0
    """Timeout of everything before the first step (processes, downloads, loading), and of writing or reading a
    checkpoint."""
    no_progress_s: Seconds = 10800.0
    """Time without any event after which the run ends. After a thirtieth of it the log says who waits for whom, and
    again each time it doubles."""

    @property
    def blip_s(self) -> float:
        """Time of retrying a replica that is out of reach before it counts as lost: answer_s / 4."""
        return self.answer_s / 4

    @property
    def report_s(self) -> float:
        """Time without any event after which the log says who waits for whom: no_progress_s / 30."""
        return self.no_progress_s / 30


@dataclass(frozen=True)
class Bound:
    """Timeout of one call."""

    seconds: float
    key: str
    """The config key that raises it, as typed."""


NOBODY = ""
"""A callee that has never answered."""


@dataclass
class Deadlines:
    """Timeouts of calls, learnt from the calls that ended.

    Example:
        deadlines = Deadlines(DeadlinesConfig(), score_s=1200.0)
        deadlines.bound("generate", "0000/0", size=4)           # Bound(3600.0, "digen.deadlines.first_s")
        deadlines.observe("generate", "0000/0", size=4, seconds=80.0)
        deadlines.bound("generate", "0000/0", size=8)           # Bound(800.0, "digen.deadlines.factor")
        deadlines.bound("generate", "0000/0", size=1)           # Bound(120.0, "digen.deadlines.answer_s")
    """

    config: DeadlinesConfig
    score_s: float
    """Minimum timeout of scoring a chunk."""
    scores_groups: bool = False
    """True if a reward compares the samples of a group."""
    _lines: dict[CallKind, RunningLine] = field(default_factory=dict)
    _known: set[tuple[CallKind, str]] = field(default_factory=set)
    """(kind, who) that have answered at least once."""

    def observe(self, kind: CallKind, who: str, *, size: int = 1, seconds: float) -> None:
        """Learn from a call of `size` items that succeeded."""
        self._lines.setdefault(kind, RunningLine()).add(size, seconds)
        self._known.add((kind, who))

    def bound(self, kind: CallKind, who: str, *, size: int = 1) -> Bound:
        """Timeout of a call of `size` items that `who` is given now."""
        config = self.config
        if kind == "score":
            bound = Bound(self.score_s, "digen.reward.timeout_s")
        else:
            bound = Bound(vars(config)[FLOORS[kind]], f"digen.deadlines.{FLOORS[kind]}")
        if kind in ("answer", "files"):
            return bound
        if (kind, who) in self._known:
            learnt = Bound(config.factor * self.predicted_s(kind, size), "digen.deadlines.factor")
        else:
            learnt = Bound(config.first_s, "digen.deadlines.first_s")
        bound = max(bound, learnt, key=lambda one: one.seconds)
        if kind == "score" and self.scores_groups:
            first_s = self.bound("generate", NOBODY, size=size).seconds
            generate_s = max(first_s, config.factor * self.predicted_s("generate", size))
            return Bound(bound.seconds + generate_s, bound.key)
        return bound

    def predicted_s(self, kind: CallKind, size: int = 1) -> float:
        """Expected seconds of a call of `size` items; 0.0 before the first of its kind has ended."""
        fixed_s, item_s = self._lines.get(kind, RunningLine()).parts_s or (0.0, 0.0)
        return fixed_s + size * item_s
