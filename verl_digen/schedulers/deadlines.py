# SPDX-License-Identifier: Apache-2.0
"""How long a call may take before it counts as hung: from the durations measured so far, with a floor.

    bound = max(FLOOR_s, factor x predicted)      once the same caller has answered a call of that kind
    bound = max(FLOOR_s, first_s)                 before: it compiles, fills caches, opens connections

Predicted is a fixed part plus a part per item (samples, groups), learnt over all callers of a kind.

Invariants (tests/schedulers/test_deadlines.py)
- A bound is never below its floor, and the first call of a caller never has a smaller one than `first_s`.
- A call that takes `factor` times as long as predicted, or less, is never overdue.
- No clock inside: durations come in, bounds go out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from verl_digen.require import require
from verl_digen.schedulers.durations import RunningLine

CallKind = Literal["generate", "assist", "score", "train", "commit", "load", "publish", "answer", "start"]
"""Kinds of calls to a replica, the trainer or an agent loop worker. "answer": any call that takes no work."""


@dataclass(frozen=True)
class DeadlinesConfig:
    """How long the run waits, in seconds. A replica that is overdue counts as lost and is started again; an overdue
    trainer or agent loop worker ends the run, whose last message names the key to raise.

    The defaults suit networks of tens of GB and trainings of minutes. With smaller floors a run of smaller parts
    notices sooner.
    """

    factor: float = 5.0
    """A call may take so many times as long as predicted from the earlier ones of its kind."""
    first_s: float = 3600.0
    """The first call of each kind that a replica or the trainer gets: compiling and filling caches counts."""
    generate_s: float = 120.0
    """Least bound of a chunk on a replica, or of a validation sample."""
    assist_s: float = 300.0
    """Least bound of a chunk that the trainer generates itself."""
    score_s: float = 1200.0
    """Least bound of scoring a chunk; at least `digen.reward.timeout_s` for every try of a sample."""
    train_s: float = 900.0
    """Least bound of a training call: the gradient of one fragment, or in the colocated trainer of the whole batch."""
    commit_s: float = 600.0
    """Least bound of the optimizer step."""
    load_s: float = 300.0
    """Least bound of a replica's switch to weights that it has received."""
    publish_s: float = 1200.0
    """Least bound of sending weights to all replicas."""
    save_s: float = 7200.0
    """Bound of writing a checkpoint, and of reading one."""
    setup_s: float = 14400.0
    """Bound of everything before the first step: processes start, models are downloaded and loaded."""
    start_s: float = 1800.0
    """Bound of starting a lost replica again; its model is loaded within."""
    answer_s: float = 120.0
    """Bound of a call that takes no work, such as a sign of life, and of encoding a prompt for the trainer."""
    abort_s: float = 60.0
    """Bound of forgetting the gradient of a step that failed: a rank may hang in a collective."""
    blip_s: float = 30.0
    """How long an unreachable replica (Ray's ActorUnavailableError) is asked again before it counts as lost."""
    report_s: float = 300.0
    """After so long without any event, the log says who waits for whom; again whenever that time has doubled."""
    no_progress_s: float = 10800.0
    """After so long without any event the run ends, whatever the other bounds say."""

    def __post_init__(self) -> None:
        require(
            1 <= self.factor < inf, "digen.deadlines.factor must be >= 1 and finite", self.factor, "5 is the default"
        )
        for name, value in vars(self).items():
            if name != "factor":
                require(
                    0 < value < inf, f"digen.deadlines.{name} must be > 0 s and finite", value, "give a large number"
                )


@dataclass(frozen=True)
class Bound:
    """How long one call may take."""

    seconds: float
    key: str
    """The config key that raises it, as typed."""


@dataclass
class Deadlines:
    """Example:
    deadlines = Deadlines(DeadlinesConfig())
    deadlines.bound("generate", "0000/0", size=4)           # Bound(3600.0, "digen.deadlines.first_s")
    deadlines.observe("generate", "0000/0", size=4, seconds=80.0)
    deadlines.bound("generate", "0000/0", size=8)           # Bound(800.0, "digen.deadlines.factor")
    deadlines.bound("generate", "0000/0", size=1)           # Bound(120.0, "digen.deadlines.generate_s")
    """

    config: DeadlinesConfig
    _lines: dict[CallKind, RunningLine] = field(default_factory=dict)
    _known: set[tuple[CallKind, str]] = field(default_factory=set)
    """(kind, who) that have answered at least once."""

    def observe(self, kind: CallKind, who: str, *, size: int = 1, seconds: float) -> None:
        """Learn from a call of `size` items that ended well."""
        self._lines.setdefault(kind, RunningLine()).add(size, seconds)
        self._known.add((kind, who))

    def bound(self, kind: CallKind, who: str, *, size: int = 1) -> Bound:
        """How long a call of `size` items may take that `who` is given now."""
        key = f"digen.deadlines.{kind}_s"
        floor = Bound(_floor_s(self.config, kind), key)
        if kind == "answer" or kind == "start":
            return floor
        if (kind, who) not in self._known:
            return max(floor, Bound(self.config.first_s, "digen.deadlines.first_s"), key=lambda bound: bound.seconds)
        predicted_s = self.predicted_s(kind, size)
        assert predicted_s is not None  # what is known was observed
        measured = Bound(self.config.factor * predicted_s, "digen.deadlines.factor")
        return max(floor, measured, key=lambda bound: bound.seconds)

    def predicted_s(self, kind: CallKind, size: int = 1) -> float | None:
        """Seconds that a call of `size` items is expected to take; None before the first of its kind has ended."""
        parts = self._lines[kind].parts_s if kind in self._lines else None
        return None if parts is None else parts[0] + size * parts[1]


def _floor_s(config: DeadlinesConfig, kind: CallKind) -> float:
    floors: dict[CallKind, float] = {
        "generate": config.generate_s,
        "assist": config.assist_s,
        "score": config.score_s,
        "train": config.train_s,
        "commit": config.commit_s,
        "load": config.load_s,
        "publish": config.publish_s,
        "answer": config.answer_s,
        "start": config.start_s,
    }
    return floors[kind]
