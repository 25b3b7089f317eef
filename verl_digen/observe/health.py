# SPDX-License-Identifier: Apache-2.0
"""Rules that say of a run whether it is healthy, and the verdicts on one. Pure; stdlib only.

`RULES` is the table: docs/metrics.md, the report's first panel and the warnings on the console are made from it. A rule
measures one number over the newest steps, and two bounds make it green, amber or red. What is not recorded, or not
often enough yet, is "unknown", never green.

*Invariants (tests/observe/test_health.py):* the runs that were recorded for docs/algorithms end green and are never
red; each rule turns red on a run with its fault; a verdict depends on the values alone, not on how often it is asked
for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, nan
from statistics import fmean, median
from typing import Literal

Level = Literal["green", "amber", "red", "unknown"]
Columns = Mapping[str, Sequence[float]]
"""Metric -> its values so far, from the steps that have it."""
RECENT = 20
"""Newest steps that are looked at."""
LEAST = 5
"""Steps from which on they are."""
LONG = 200
"""Newest steps that a growing gradient is compared with."""
LEAST_VALIDATIONS = 4
"""Validations from which on they are. Of 400 simulated runs that learn nothing, 5 % turn red in 60 validations."""
AVERAGED = 3
"""Newest validations whose mean counts."""
CLEAR = 6.0
"""Noise of a validation, times this: a change that is none of it."""
SAFE_GAP = 3e-3
"""Gap of log-probs, in nats, that half precision can explain; where no clip range says what is harmless."""
SAFE_SHARE = 1 / 3
"""Share of the clip range that rounding may take. At a third it clips one ratio of a hundred: the mean of |x| of a
normal variable is 0.8 of its standard deviation, so that the clip lies at 2.4 of these."""

VALIDATION, SPREAD, EQUAL = "val/reward", "reward/std", "reward/zero_spread_fraction"
GAP, GRADIENT, TO_EPS = "rollout/log_prob_gap_to_bound", "actor/grad_norm", "actor/grad_rms_to_eps"
CLIPPED, RESTARTS, OVERHEAD, STEP_S = "actor/clip_fraction", "rollout/num_restarts", "perf/overhead_s", "perf/step_s"
AGAIN = ("rollout/refilled_groups", "batch/refilled_samples")
VERDICT, WARNING = "hacking/verdict", "hacking/warning"


def gap_metrics(metrics: Mapping[str, float], clip_width: float | None) -> dict[str, float]:
    """`rollout/log_prob_gap_to_bound` of a step: the mean gap over what is harmless; {} without a gap, and with samples
    of older weights, whose log-probs differ for that. `clip_width`: of a ratio against recorded log-probs; None: the
    ratio does not see their rounding."""
    if "rollout/log_prob_gap_mean" not in metrics or metrics["rollout/version_age_max_versions"] > 0:
        return {}
    return {GAP: metrics["rollout/log_prob_gap_mean"] / (SAFE_GAP if clip_width is None else SAFE_SHARE * clip_width)}


def _typical(values: Sequence[float]) -> float | None:
    """Median of the newest values; nan if the very newest are all not finite; None if there are too few."""
    if len(values) < LEAST:
        return None
    if not any(map(isfinite, values[-LEAST:])):  # fp16 skips a step or two at the start
        return nan
    return median(filter(isfinite, values[-RECENT:]))


def _newest(metric: str) -> Callable[[Columns], float | None]:
    return lambda columns: _typical(columns[metric])


def _noise(values: Sequence[float]) -> float:
    """Standard deviation of values around their trend, from second differences, which a trend does not raise."""
    changes = [after - before for before, after in pairwise(values)]
    return math.sqrt(fmean((after - before) ** 2 for before, after in pairwise(changes)) / 6)


def _risen(columns: Columns) -> float | None:
    values = list(filter(isfinite, columns[VALIDATION]))
    if columns[VALIDATION] and not isfinite(columns[VALIDATION][-1]):
        return nan
    if len(values) < LEAST_VALIDATIONS:
        return None
    return (fmean(values[-AVERAGED:]) - values[0]) / max(_noise(values), 1e-9)


def _lost(columns: Columns) -> float | None:
    values = list(filter(isfinite, columns[VALIDATION]))
    if len(values) < LEAST_VALIDATIONS:
        return None
    means = [fmean(values[end - AVERAGED : end]) for end in range(AVERAGED, len(values) + 1)]
    best = max(means)
    return (best - means[-1]) / max(best - values[0], CLEAR * _noise(values), 1e-9)


def _spread(columns: Columns) -> float | None:
    values = columns[SPREAD]
    if len(values) < 2 * LEAST:
        return None
    return median(values[-LEAST:]) / max(median(values[:LEAST]), 1e-9)


def _growth(columns: Columns) -> float | None:
    values = columns[GRADIENT]
    now = _typical(values[-2 * LEAST :])
    if now is None:
        return None
    if not isfinite(now) or now == 0:
        return inf
    earlier = list(filter(isfinite, values[-LONG : -2 * LEAST]))
    return now / median(earlier) if len(earlier) >= RECENT and median(earlier) > 0 else 1.0


def _failures(columns: Columns) -> float | None:
    restarts = columns[RESTARTS]
    if not restarts:
        return None
    before = restarts[-RECENT - 1] if len(restarts) > RECENT else 0.0
    again = sum(sum(columns[name][-RECENT:]) for name in AGAIN)
    return (max(0.0, restarts[-1] - before) + again) / min(RECENT, len(restarts))


def _overhead(columns: Columns) -> float | None:
    newest = zip(columns[OVERHEAD][-RECENT:], columns[STEP_S][-RECENT:], strict=False)
    return _typical([spent / whole for spent, whole in newest])


@dataclass(frozen=True)
class Rule:
    """A row of the table."""

    name: str
    metric: str
    """Drawn beside the verdict."""
    measure: Callable[[Columns], float | None]
    """Number that the bounds are for; None: not recorded, or not often enough."""
    told: str
    """Format of that number."""
    amber: float
    """Last value that is green."""
    red: float
    """Last value that is amber."""
    meaning: str
    """The fault, when it is amber or red."""
    remedy: str
    page: str
    """Link, relative to docs/."""
    needs: str = f"after {LEAST} steps"
    """The condition for a verdict."""
    is_below: bool = False
    """True: values below the bounds are bad."""

    def level(self, value: float | None) -> Level:
        """The colour of a measured value."""
        if value is None:
            return "unknown"
        sign = -1 if self.is_below else 1
        if not sign * value <= sign * self.red:  # also for nan
            return "red"
        return "green" if sign * value <= sign * self.amber else "amber"


LEARNS = "troubleshooting.md#it-runs-and-does-not-learn"
RULES = (
    Rule(
        *("Validation reward rises", VALIDATION, _risen),
        *("{:+.1f} x its noise since the first validation", 2.0, -5.0),
        "The run does not learn, or it unlearns: the newest validations are not above the first by more than noise.",
        "First look at the next rows; then try a larger learning rate, larger groups, or more prompts per step.",
        *(LEARNS, f"after {LEAST_VALIDATIONS} validations"),
        is_below=True,
    ),
    Rule(
        *("Validation reward holds", VALIDATION, _lost, "{:.0%} of its gain lost", 0.5, 1.0),
        "The reward has fallen: training has become unstable, or optimizes something else.",
        "Go back to the checkpoint of the best validation, with a smaller learning rate or a digen.kl.coef.",
        *(LEARNS, f"after {LEAST_VALIDATIONS} validations"),
    ),
    Rule(
        *("Spread of the rewards", SPREAD, _spread, "{:.2g} x the first steps' spread", 0.1, 0.01),
        "All samples score nearly the same, so there is little to learn from.",
        "If the reward is at its maximum, the run is done. Else use a finer reward, harder prompts, or more noise "
        "(digen.sde.noise_level).",
        *(LEARNS, f"after {2 * LEAST} steps"),
        is_below=True,
    ),
    Rule(
        *("Groups without spread", EQUAL, _newest(EQUAL), "{:.0%} of the groups", 0.5, 0.9),
        "All samples of a prompt score the same in these groups, which then have no gradient.",
        "Use easier or harder prompts, a finer reward, larger groups (actor_rollout_ref.rollout.n), or more noise.",
        LEARNS,
    ),
    Rule(
        *("What was sampled is trained", GAP, _newest(GAP), "{:.2f} x the harmless gap", 1.0, 3.0),
        "Trainer and replicas disagree on log-probs of a step, by more than rounding or than the clip range allows.",
        "Compare the dtypes (actor_rollout_ref.rollout.dtype, fsdp_config.mixed_precision.param_dtype) and attention "
        "kernels of both sides; widen the clip range; or set digen.loss.old_log_probs=auto.",
        *(
            "metrics.md#what-was-sampled-is-what-is-trained",
            f"after {LEAST} steps with log-probs of the newest weights",
        ),
    ),
    Rule(
        *("Gradient", GRADIENT, _growth, "{:.1f} x the norm of earlier steps", 5.0, 30.0),
        "The gradient is zero, not finite, or growing fast.",
        "At zero: see the groups without spread. Else lower the learning rate, the clip range or "
        "digen.loss.advantage_clip.",
        LEARNS,
    ),
    Rule(
        *("Gradient against Adam's eps", TO_EPS, _newest(TO_EPS), "{:,.0f} x eps", 10.0, 10.0),
        "Adam's eps shortens the steps, so the learning rate means less than it says.",
        "Lower it: +actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-15.",
        *("numerics.md#metrics", f"after {LEAST} steps with Adam"),
        is_below=True,
    ),
    Rule(
        *("Clipped ratios", CLIPPED, _newest(CLIPPED), "{:.0%} of the rows", 0.5, 0.9),
        "Most rows are clipped, so they add nothing to the gradient.",
        "Lower the learning rate, take fewer optimizer steps per batch, or widen digen.loss.clip_range.",
        *("algorithms/trust_regions.md", f"after {LEAST} steps with a clipped loss"),
    ),
    Rule(
        *("Failures", RESTARTS, _failures, f"{{:.2g}} per step in the newest {RECENT}", 0.0, 1.0),
        "Replicas were restarted, or failed samples were generated again.",
        "The log has the cause: memory, a driver, a reward's server.",
        *("faults.md", "after a step"),
    ),
    Rule(
        *("Overhead", OVERHEAD, _overhead, "{:.0%} of a step", 0.4, 0.7),
        "For much of a step no device generates, scores or trains.",
        "`digen timeline RUN` names what devices wait for.",
        "metrics.md#where-the-time-goes",
    ),
    Rule(
        *("Reward hacking", VERDICT),
        lambda columns: columns[WARNING][-1] + columns[VERDICT][-1] if columns[VERDICT] else None,
        *("stage {:.0f} of 2 (warning, verdict)", 0.0, 1.0),
        "The trained reward rises while a gold reward falls.",
        "Look at the pictures. Stop at the best validation (digen.reward.stop_on_hacking), raise digen.kl.coef, or mix "
        "rewards.",
        *("rewards.md#watching", "with a gold reward"),
    ),
)

NAMES = dict.fromkeys((*(rule.metric for rule in RULES), *AGAIN, STEP_S, WARNING))


@dataclass(frozen=True)
class Verdict:
    """A rule's verdict on a run."""

    rule: Rule
    level: Level
    value: float | None
    """Newest value of the rule's metric."""
    measured: float | None

    @property
    def text(self) -> str:
        """The measured number in words."""
        if self.measured is None:
            return f"measured {self.rule.needs}"
        return self.rule.told.format(self.measured) if isfinite(self.measured) else "zero, or not finite"

    @property
    def warning(self) -> str:
        """A line for the console."""
        rule, value = self.rule, "nothing" if self.value is None else f"{self.value:.4g}"
        return f"health: {rule.metric} is {value} ({self.text}). {rule.meaning} {rule.remedy} (docs/{rule.page})"


class Health:
    """See the module. It is given the metrics of every step and validation, in order."""

    def __init__(self) -> None:
        self._columns: dict[str, list[float]] = {name: [] for name in NAMES}

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take in a step, or a validation."""
        for name, values in self._columns.items():
            if name in metrics:
                values.append(metrics[name])

    def verdicts(self) -> list[Verdict]:
        """One per rule."""
        found = []
        for rule in RULES:
            measured, values = rule.measure(self._columns), self._columns[rule.metric]
            found.append(Verdict(rule, rule.level(measured), values[-1] if values else None, measured))
        return found
