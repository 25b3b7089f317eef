# SPDX-License-Identifier: Apache-2.0
"""Summary of runs by mode: medians over steps and repeats, ratios, agreement. Pure.

- The first `num_warm_up` steps of every run are left out.
- A ratio is computed per repeat, of runs that followed each other, and the median of these is taken: a machine that
  gets slower over the hours changes it little.
- Devices of all pools count, rewards included, the same number for every mode, whichever of them idle.
- Modes are compared with the best baseline: the fastest that overlaps nothing, of those that were run.

*Invariants (tests/bench/test_summary.py):* the order of the runs does not matter; a mode's ratio to itself is 1;
runs that trained the same differ by 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from verl_digen.tools.bench.runs import RunResult
from verl_digen.tools.simulate.cluster import BASELINES

GRADIENT_NORM = "actor/grad_norm"
GRADIENT_PROJECTION = "actor/grad_projection"
"""Compared between modes, together with the norm: equal work gives equal gradients, step by step. A norm alone would
not show a reversed or permuted gradient."""
PLANNER_ERROR = "bts/prediction_error"
POOLS = ("trainer", "generator")
SAMPLES_BY_AGE = re.compile(r"staleness/samples_([0-9]+)_versions")
"""Metrics that count the samples of a step by the age of the weights that generated them."""


@dataclass(frozen=True)
class Summary:
    """Results of one mode."""

    mode: str
    num_runs: int
    num_steps: int
    """Number of measured steps, over all runs."""
    step_s: float
    """Median step time over all of them."""
    spread_s: tuple[float, float]
    """Lowest and highest of the runs' own medians."""
    images_per_s: float
    images_per_s_per_device: float
    speedup: Mapping[str, float]
    """Baseline -> speedup over it, for the baselines that were run."""
    bubbles: Mapping[str, float]
    """Pool -> idle share; empty where pools take turns."""
    stale: float | None
    """Share of the samples that were generated under weights older than those they train; 0 is strict. None where the
    runs did not count them."""
    overlap: float | None
    """Share of the step in which trainer and generator worked at once."""
    final_reward: float
    """Mean of the last step, median over runs."""
    max_gradient_gap: float | None
    """Largest difference of a step's gradient, of its norm or of its fixed ±1 projection, to the first mode's
    first run, relative to the norm; over all steps, warm-up included. None where nothing is trained."""
    planner_error: float | None = None
    """Median of |`bts/prediction_error`|, how far the live planner was off; None where it predicted nothing."""


def summarise(runs: Sequence[RunResult], *, num_warm_up: int, num_devices: int) -> list[Summary]:
    """One summary per mode, in the order of first appearance by repeat and run."""
    by_mode: dict[str, list[RunResult]] = {}
    for run in sorted(runs, key=lambda run: run.repeat):
        by_mode.setdefault(run.mode.name, []).append(run)
    medians = {
        name: {run.repeat: _median(run, "perf/step_s", num_warm_up) for run in of_mode}
        for name, of_mode in by_mode.items()
    }
    reference = next(iter(by_mode.values()))[0]
    return [
        _summary(
            of_mode,
            measured=[row for run in of_mode for row in run.steps[num_warm_up:]],
            own_s=medians[name],
            num_devices=num_devices,
            speedup=_speedup(medians[name], medians),
            max_gradient_gap=_gradient_gap(reference, of_mode),
        )
        for name, of_mode in by_mode.items()
    ]


def _summary(
    of_mode: Sequence[RunResult],
    *,
    measured: Sequence[Mapping[str, float]],
    own_s: Mapping[int, float],
    num_devices: int,
    speedup: Mapping[str, float],
    max_gradient_gap: float | None,
) -> Summary:
    """The summary of one mode.

    Args:
        measured: metrics of the measured steps of all runs.
        own_s: repeat -> median step time.
    """
    images_per_s = median(row["perf/images_per_s"] for row in measured)
    return Summary(
        mode=of_mode[0].mode.name,
        num_runs=len(of_mode),
        num_steps=len(measured),
        step_s=median(row["perf/step_s"] for row in measured),
        spread_s=(min(own_s.values()), max(own_s.values())),
        images_per_s=images_per_s,
        images_per_s_per_device=images_per_s / num_devices,
        speedup=speedup,
        bubbles={
            pool: median(row[f"perf/bubble_fraction/{pool}"] for row in measured)
            for pool in POOLS
            if all(f"perf/bubble_fraction/{pool}" in row for row in measured)
        },
        stale=_stale_share(measured),
        overlap=(
            median(row["perf/overlap_s"] / row["perf/step_s"] for row in measured)
            if all("perf/overlap_s" in row for row in measured)
            else None
        ),
        final_reward=median(run.steps[-1]["reward/mean"] for run in of_mode),
        max_gradient_gap=max_gradient_gap,
        planner_error=_planner_error(measured),
    )


def _speedup(own_s: Mapping[int, float], medians: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Baseline -> speedup over it, repeat by repeat.

    Args:
        medians: mode -> repeat -> median step time.
    """
    return {
        baseline: median(medians[baseline][repeat] / own_s[repeat] for repeat in own_s)
        for baseline in BASELINES
        if baseline in medians
    }


def _stale_share(measured: Sequence[Mapping[str, float]]) -> float | None:
    ages = [
        (int(match[1]), count)
        for row in measured
        for name, count in row.items()
        if (match := SAMPLES_BY_AGE.fullmatch(name))
    ]
    num_samples = sum(count for _, count in ages)
    return sum(count for age, count in ages if age > 0) / num_samples if num_samples else None


def best_baseline(summaries: Sequence[Summary]) -> str | None:
    """The fastest of the baselines; None where there is none. The same for every mode."""
    return min(summaries[0].speedup, key=lambda name: summaries[0].speedup[name], default=None)


def _median(run: RunResult, name: str, num_warm_up: int) -> float:
    return median(row[name] for row in run.steps[num_warm_up:])


def _gradient_gap(reference: RunResult, runs: Sequence[RunResult]) -> float | None:
    if not all(GRADIENT_NORM in row for run in (reference, *runs) for row in run.steps):
        return None
    return max(
        abs(row[name] - expected[name]) / max(expected[GRADIENT_NORM], 1e-30)
        for run in runs
        for row, expected in zip(run.steps, reference.steps, strict=True)
        for name in (GRADIENT_NORM, GRADIENT_PROJECTION)
    )


def _planner_error(measured: Sequence[Mapping[str, float]]) -> float | None:
    errors = [abs(row[PLANNER_ERROR]) for row in measured if PLANNER_ERROR in row]
    return median(errors) if errors else None


def table(summaries: Sequence[Summary]) -> str:
    """Format the summaries as text; `-` where a mode has no such number."""
    best = best_baseline(summaries)
    has_planner = any(summary.planner_error is not None for summary in summaries)
    width = max(len("colocated"), *(len(summary.mode) for summary in summaries)) + 2
    lines = ["seconds, images, idle shares: measured, on this machine"]
    if best is not None:
        lines.append(f"best baseline: {best}; x best: times as fast as it")
    lines.append("stale: share of samples generated under weights older than those they train; 0 % is strict")
    head = (
        f"{'mode':<{width}}{'s/step':>8} {'(runs)':<15}{'images/s':>9}{'/device':>9}"
        f"{'x best':>8}{'stale':>8}{'trainer idle':>13}{'generator idle':>15}"
        f"{'overlap':>9}{'reward':>8}{'gradient gap':>13}"
    )
    if has_planner:
        head += f"{'planner off':>13}"
    lines += ["", head]
    for summary in summaries:
        low_s, high_s = summary.spread_s
        line = (
            f"{summary.mode:<{width}}{summary.step_s:>8.3f} {f'({low_s:.3f}..{high_s:.3f})':<15}"
            f"{summary.images_per_s:>9.2f}{summary.images_per_s_per_device:>9.3f}"
            f"{'-' if best is None else format(summary.speedup[best], '.2f'):>8}{_number(summary.stale, '.1%'):>8}"
            f"{_cell(summary.bubbles, 'trainer', '.1%'):>13}{_cell(summary.bubbles, 'generator', '.1%'):>15}"
            f"{_number(summary.overlap, '.1%'):>9}{summary.final_reward:>8.3f}"
            f"{_number(summary.max_gradient_gap, '.1e'):>13}"
        )
        if has_planner:
            line += f"{_number(summary.planner_error, '.1%'):>13}"
        lines.append(line)
    return "\n".join(lines)


def to_json(summaries: Sequence[Summary], runs: Sequence[RunResult], setting: Mapping[str, Any]) -> dict[str, Any]:
    """All data behind the table."""
    return {
        "setting": dict(setting),
        "modes": [asdict(summary) for summary in summaries],
        "runs": [
            {
                "mode": run.mode.name,
                "repeat": run.repeat + 1,
                "run_dir": str(run.run_dir),
                "wall_s": run.wall_s,
                "steps": [dict(row) for row in run.steps],
            }
            for run in runs
        ],
    }


def _cell(values: Mapping[str, float], key: str, form: str) -> str:
    return format(values[key], form) if key in values else "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
