# SPDX-License-Identifier: Apache-2.0
"""Alarm for a hacked reward: over the newest validations the trained reward rises while a gold reward falls. No I/O.

| verdict | when |
| --- | --- |
| `too_few` | fewer than `least` in the window |
| `fine` | else |
| `warning` | the reward's trend is >= `threshold` and a gold reward's is <= -`threshold` |
| `hacking` | `warning` in each of the last `patience` validations |

- A trend is a Theil-Sen slope (the median slope of all pairs of points, which one outlier hardly moves) over its
  standard error sigma / sqrt(sum (x - mean x)^2), x being the step.
- sigma is estimated from the mean absolute change c between neighbours: sigma = c sqrt(pi) / 2, exact for normal noise
  without a trend. A trend raises it, so that a straight line has a finite trend too: 4.7 with 6 points, 10 with 10.

Invariants (tests/reward/test_hacking.py)
- Equal observations give equal states; a step that is observed again replaces what was observed there.
- Scale and offset of a reward do not matter, and rewards that are constant have no trend.
- A single outlier raises no alarm. At most `window` points are kept.
- `best` is the first step with the highest value of each gold reward, also when it has left the window.

Example:
    alarm = HackingAlarm(("pick",), Rules(least=3, threshold=1.0, patience=1))
    alarm.observe(10, reward=0.5, golds={"pick": 0.8})  # verdict too_few
    alarm.observe(20, reward=0.6, golds={"pick": 0.7})  # verdict too_few
    alarm.observe(30, reward=0.7, golds={"pick": 0.6})  # verdict hacking, of pick
    alarm.best["pick"]                                  # Best(step=10, value=0.8)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from statistics import fmean, median
from typing import Any, Literal

Verdict = Literal["too_few", "fine", "warning", "hacking"]


@dataclass(frozen=True)
class Rules:
    """When the alarm holds. By the defaults 5 % of runs of 60 validations with a flat, noisy gold reward have a verdict
    (simulated)."""

    window: int = 10
    """Newest validations that are looked at."""
    least: int = 6
    """Fewest validations for a verdict; fewer points have no noise."""
    threshold: float = 3.0
    """Smallest trend, in standard errors. Of flat, noisy series of 6 to 10 points 1 to 2 % fall by 3 (simulated)."""
    patience: int = 3
    """Validations in a row with the warning."""


RULES = Rules()


@dataclass(frozen=True)
class Point:
    """Means over the samples of one validation."""

    step: int
    reward: float
    """The trained reward."""
    golds: Mapping[str, float]


@dataclass(frozen=True)
class Best:
    """The best validation of one gold reward."""

    step: int
    value: float


@dataclass(frozen=True)
class Finding:
    """Judgement after one validation."""

    verdict: Verdict
    reward_trend: float
    """Trend of the reward in standard errors; 0.0 with `too_few`."""
    gold_trends: Mapping[str, float]
    """Gold reward -> trend in standard errors; empty with `too_few`."""
    falling: tuple[str, ...]
    """Gold rewards for which the verdict is `warning` or `hacking`."""


class HackingAlarm:
    """See the module.

    Args:
        golds: names of the gold rewards.
    """

    def __init__(self, golds: Sequence[str], rules: Rules = RULES):
        self._rules, self._golds = rules, tuple(golds)
        self._points: list[Point] = []
        self._warned: dict[int, bool] = {}
        """Step of each point -> True if the verdict was `warning` or `hacking` there."""
        self.best: dict[str, Best] = {}

    def observe(self, step: int, *, reward: float, golds: Mapping[str, float]) -> Finding:
        """Add the validation after `step` optimizer steps -> the judgement.

        Args:
            golds: value of each gold reward.

        Raises:
            RuntimeError: a gold reward has no value, or a later step was observed before.
        """
        missing = [name for name in self._golds if name not in golds]
        if missing:
            raise RuntimeError(f"a validation must have a value of each gold reward, got none of {missing}")
        if self._points and step < self._points[-1].step:
            raise RuntimeError(f"validations must be observed in order, got {step} after {self._points[-1].step}")
        values = {name: float(golds[name]) for name in self._golds}
        kept = [point for point in self._points if point.step != step]
        self._points = [*kept, Point(step, float(reward), values)][-self._rules.window :]
        for name, value in values.items():
            if name not in self.best or value > self.best[name].value:
                self.best[name] = Best(step, value)
        return self._judge()

    def _judge(self) -> Finding:
        rules, points = self._rules, self._points
        finding = Finding("too_few", 0.0, {}, ())
        if len(points) >= rules.least:
            steps = [point.step for point in points]
            rise = trend(steps, [point.reward for point in points])
            trends = {name: trend(steps, [point.golds[name] for point in points]) for name in self._golds}
            rises = rise >= rules.threshold
            falling = tuple(name for name, value in trends.items() if rises and value <= -rules.threshold)
            finding = Finding("warning" if falling else "fine", rise, trends, falling)
        last = points[-1].step
        self._warned = {point.step: self._warned.get(point.step, False) for point in points} | {
            last: bool(finding.falling)
        }
        recent = list(self._warned.values())[-rules.patience :]
        if len(recent) == rules.patience and all(recent):
            return Finding("hacking", finding.reward_trend, finding.gold_trends, finding.falling)
        return finding

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "points": [asdict(point) for point in self._points],
            "warned": [step for step, warned in self._warned.items() if warned],
            "best": {name: asdict(best) for name, best in self.best.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned. Points without a value of each gold reward are left out."""
        points = [Point(**point) for point in state["points"]]
        self._points = [point for point in points if {*self._golds} <= {*point.golds}]
        self._points = self._points[-self._rules.window :]
        self._warned = {point.step: point.step in state["warned"] for point in self._points}
        self.best = {name: Best(**best) for name, best in state["best"].items() if name in self._golds}


def trend(steps: Sequence[int], values: Sequence[float]) -> float:
    """Theil-Sen slope over its standard error, see the module; 0.0 for constant values.

    Args:
        steps: increasing.
    """
    slope = median(
        (values[later] - values[earlier]) / (steps[later] - steps[earlier])
        for earlier, later in combinations(range(len(steps)), 2)
    )
    sigma = fmean(abs(after - before) for before, after in pairwise(values)) * math.sqrt(math.pi) / 2
    if sigma == 0:
        return 0.0
    middle = fmean(steps)
    return slope * math.sqrt(sum((step - middle) ** 2 for step in steps)) / sigma
