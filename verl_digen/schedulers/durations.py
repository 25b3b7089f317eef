# SPDX-License-Identifier: Apache-2.0
"""Durations of generation, scoring and training: given, or learnt during the run as running averages.

Training is a fixed part per call and a part per group; assisting, per call and per round (the samples of the fullest
rank; the last round may leave ranks idle). The two parts can be separated as soon as calls of two sizes were seen.

Invariant: constant durations are learnt exactly (to rounding), from the first measurement on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NEWEST_WEIGHT = 0.2
"""Weight of the newest measurement in a running average: a change of speed is learnt within about five of them."""

MIN_SIZE_VARIANCE = 1e-6
"""Size variance below which all calls count as one size: fixed part and part per item cannot be separated."""


@dataclass(frozen=True)
class KnownDurations:
    """Constant durations, for simulation. They learn nothing from what the planner reports."""

    sample_s: Mapping[str, float]
    """Slot -> seconds to generate one sample."""
    assisted_s: Sequence[float]
    """Seconds of an assist of 1, 2, ... rounds, up to the largest."""
    scoring_s: float
    fragment_s: Sequence[float]
    """Seconds to train a fragment of 1, 2, ... groups, up to the largest fragment."""

    def generate_sample_s(self, slot: str) -> float | None:
        return self.sample_s[slot]

    def assist_s(self) -> tuple[float, float] | None:
        """The line through the smallest and the largest assist."""
        return _line(self.assisted_s)

    def score_s(self) -> float | None:
        return self.scoring_s

    def train_s(self) -> tuple[float, float] | None:
        """The line through the smallest and the largest fragment."""
        return _line(self.fragment_s)

    def on_generated(self, slot: str, num_samples: int, seconds: float) -> None: ...

    def on_assisted(self, num_rounds: int, seconds: float) -> None: ...

    def on_scored(self, seconds: float) -> None: ...

    def on_trained(self, num_groups: int, seconds: float) -> None: ...


def _line(seconds: Sequence[float]) -> tuple[float, float]:
    """(fixed part, part per item) of calls with 1, 2, ... items, through the first and the last."""
    num_more = len(seconds) - 1
    item_s = (seconds[-1] - seconds[0]) / num_more if num_more else seconds[0]
    return max(0.0, seconds[0] - item_s), item_s


@dataclass
class RunningMean:
    """Exponentially weighted mean without the first value; a plain mean over the first 1/NEWEST_WEIGHT after it. The
    very first includes compilation, cache filling and memory allocation: it counts only while it is the only one."""

    value: float | None = None
    _count: int = 0

    def add(self, value: float) -> None:
        if self.value is None:
            self.value = value
        else:
            self._count += 1
            self.value += max(NEWEST_WEIGHT, 1 / self._count) * (value - self.value)


@dataclass
class RunningLine:
    """Seconds of a call as (fixed part, part per item): least squares, weighted as in `RunningMean`. Proportional
    (fixed part 0) while all calls had one size, or if the fit makes either part negative."""

    _size: RunningMean = field(default_factory=RunningMean)
    _size_squared: RunningMean = field(default_factory=RunningMean)
    _seconds: RunningMean = field(default_factory=RunningMean)
    _product: RunningMean = field(default_factory=RunningMean)

    def add(self, size: float, seconds: float) -> None:
        self._size.add(size)
        self._size_squared.add(size**2)
        self._seconds.add(seconds)
        self._product.add(size * seconds)

    @property
    def parts_s(self) -> tuple[float, float] | None:
        size, squared, seconds, product = (
            mean.value for mean in (self._size, self._size_squared, self._seconds, self._product)
        )
        if size is None or squared is None or seconds is None or product is None:
            return None
        variance = squared - size**2
        if variance > MIN_SIZE_VARIANCE:
            item_s = (product - size * seconds) / variance
            fixed_s = seconds - item_s * size
            if item_s >= 0 and fixed_s >= 0:
                return fixed_s, item_s
        return 0.0, seconds / size


@dataclass
class MeasuredDurations:
    """Running averages of the durations that the planner reports. A value is None until it is known.

    Example:
        durations = MeasuredDurations()
        durations.generate_sample_s("a")                        # None
        durations.on_generated("a", num_samples=4, seconds=2.0)
        durations.generate_sample_s("b")                        # 0.5: the mean of the slots measured so far
    """

    _slots: dict[str, RunningMean] = field(default_factory=dict)
    _any_slot: RunningMean = field(default_factory=RunningMean)
    _assist: RunningLine = field(default_factory=RunningLine)
    _score: RunningMean = field(default_factory=RunningMean)
    _train: RunningLine = field(default_factory=RunningLine)

    def generate_sample_s(self, slot: str) -> float | None:
        measured = self._slots.get(slot)
        return self._any_slot.value if measured is None else measured.value

    def assist_s(self) -> tuple[float, float] | None:
        """(fixed seconds of an assist, seconds per round)."""
        return self._assist.parts_s

    def score_s(self) -> float | None:
        """Seconds from the end of a chunk's generation to its last score."""
        return self._score.value

    def train_s(self) -> tuple[float, float] | None:
        """(fixed seconds of a training call, seconds per group)."""
        return self._train.parts_s

    def on_generated(self, slot: str, num_samples: int, seconds: float) -> None:
        self._slots.setdefault(slot, RunningMean()).add(seconds / num_samples)
        self._any_slot.add(seconds / num_samples)

    def on_assisted(self, num_rounds: int, seconds: float) -> None:
        self._assist.add(num_rounds, seconds)

    def on_scored(self, seconds: float) -> None:
        self._score.add(seconds)

    def on_trained(self, num_groups: int, seconds: float) -> None:
        self._train.add(num_groups, seconds)


Durations = KnownDurations | MeasuredDurations
"""Durations that the planner reads, and reports to."""
