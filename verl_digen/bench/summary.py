# SPDX-License-Identifier: Apache-2.0
"""What runs say about their modes: medians over steps and repeats, ratios, agreement. Pure.

- The first `num_warm_up` steps of every run are left out.
- A ratio is made repeat by repeat, of runs that followed each other, and the median of these is taken: a machine that
  gets slower over the hours changes it little.
- Devices are those of all pools, the same number for every mode, whichever of them idle.

*Invariants (tests/bench/test_summary.py):* the order of the runs does not matter; a mode's ratio to itself is 1;
runs that trained the same differ by 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from verl_digen.bench.modes import BARRIER, COLOCATED
from verl_digen.bench.runs import RunResult

GRADIENT = "actor/grad_norm"
"""What modes are compared by: equal work gives equal gradients, step by step."""
PLANNER_ERROR = "bts/prediction_error"
POOLS = ("trainer", "generator")


@dataclass(frozen=True)
class Prediction:
    """What is known of a mode on virtual devices without running it."""

    step_s: float
    """By the simulator."""
    bound_s: float
    """No schedule with the mode's techniques is faster, see `verl_digen.simulate.bound`."""
    colocated_s: float | None
    """Of the same devices in turns, by the simulator; None where they are of two types."""


@dataclass(frozen=True)
class Summary:
    """One mode."""

    mode: str
    num_runs: int
    num_steps: int
    """Measured, over all runs."""
    step_s: float
    """Median over all of them."""
    spread_s: tuple[float, float]
    """Lowest and highest of the runs' own medians."""
    images_per_s: float
    images_per_s_per_device: float
    speedup: Mapping[str, float]
    """Baseline -> how many times faster than it; of the baselines that were run."""
    bubbles: Mapping[str, float]
    """Pool -> idle share; empty where pools take turns."""
    overlap: float | None
    """Share of the step in which trainer and generator worked at once."""
    final_reward: float
    """Mean of the last step, median over runs."""
    max_gradient_gap: float | None
    """Largest relative difference of a step's gradient norm to the first mode's first run, over all steps, warm-up
    included; None where nothing is trained."""
    prediction: Prediction | None = None
    """Where devices are virtual."""
    planner_error: float | None = None
    """Median of |`bts/prediction_error`|, how far the live planner was off; None where it predicted nothing."""


def summarise(
    runs: Sequence[RunResult],
    *,
    num_warm_up: int,
    num_devices: int,
    predictions: Mapping[str, Prediction],
) -> list[Summary]:
    """One summary per mode, in the order of first appearance by repeat and run.

    Args:
        predictions: of the modes that have one.
    """
    by_mode: dict[str, list[RunResult]] = {}
    for run in sorted(runs, key=lambda run: run.repeat):
        by_mode.setdefault(run.mode.name, []).append(run)
    medians = {
        name: {run.repeat: _median(run, "perf/step_s", num_warm_up) for run in of_mode}
        for name, of_mode in by_mode.items()
    }
    reference = next(iter(by_mode.values()))[0]
    summaries = []
    for name, of_mode in by_mode.items():
        measured = [row for run in of_mode for row in run.steps[num_warm_up:]]
        step_s = median(row["perf/step_s"] for row in measured)
        images_per_s = median(row["perf/images_per_s"] for row in measured)
        own = medians[name]
        summaries.append(
            Summary(
                mode=name,
                num_runs=len(of_mode),
                num_steps=len(measured),
                step_s=step_s,
                spread_s=(min(own.values()), max(own.values())),
                images_per_s=images_per_s,
                images_per_s_per_device=images_per_s / num_devices,
                speedup={
                    baseline: median(medians[baseline][repeat] / own[repeat] for repeat in own)
                    for baseline in (BARRIER, COLOCATED)
                    if baseline in medians
                },
                bubbles={
                    pool: median(row[f"perf/bubble_fraction/{pool}"] for row in measured)
                    for pool in POOLS
                    if all(f"perf/bubble_fraction/{pool}" in row for row in measured)
                },
                overlap=(
                    median(row["perf/overlap_s"] / row["perf/step_s"] for row in measured)
                    if all("perf/overlap_s" in row for row in measured)
                    else None
                ),
                final_reward=median(run.steps[-1]["reward/mean"] for run in of_mode),
                max_gradient_gap=_gradient_gap(reference, of_mode),
                prediction=predictions.get(name),
                planner_error=_planner_error(measured),
            )
        )
    return summaries


def _median(run: RunResult, name: str, num_warm_up: int) -> float:
    return median(row[name] for row in run.steps[num_warm_up:])


def _gradient_gap(reference: RunResult, runs: Sequence[RunResult]) -> float | None:
    if not all(GRADIENT in row for run in (reference, *runs) for row in run.steps):
        return None
    return max(
        abs(row[GRADIENT] - expected[GRADIENT]) / max(abs(expected[GRADIENT]), 1e-30)
        for run in runs
        for row, expected in zip(run.steps, reference.steps, strict=True)
    )


def _planner_error(measured: Sequence[Mapping[str, float]]) -> float | None:
    errors = [abs(row[PLANNER_ERROR]) for row in measured if PLANNER_ERROR in row]
    return median(errors) if errors else None


def table(summaries: Sequence[Summary]) -> str:
    """The summaries as text; `-` where a mode has no such number, `~` before one that was simulated."""
    has_predictions = any(summary.prediction is not None for summary in summaries)
    has_planner = any(summary.planner_error is not None for summary in summaries)
    width = max(len("colocated"), *(len(summary.mode) for summary in summaries)) + 2
    head = (
        f"{'mode':<{width}}{'s/step':>8} {'(runs)':<15}{'images/s':>9}{'/device':>9}"
        f"{'x barrier':>10}{'x colocated':>12}{'trainer idle':>13}{'generator idle':>15}"
        f"{'overlap':>9}{'reward':>8}{'gradient gap':>13}"
    )
    if has_predictions:
        head += f"{'simulated':>10}{'off by':>8}{'bound':>9}{'over it':>9}"
    if has_planner:
        head += f"{'planner off':>13}"
    lines = [head]
    for summary in summaries:
        low_s, high_s = summary.spread_s
        line = (
            f"{summary.mode:<{width}}{summary.step_s:>8.3f} {f'({low_s:.3f}..{high_s:.3f})':<15}"
            f"{summary.images_per_s:>9.2f}{summary.images_per_s_per_device:>9.3f}"
            f"{_cell(summary.speedup, BARRIER, '.2f'):>10}{_colocated(summary):>12}"
            f"{_cell(summary.bubbles, 'trainer', '.1%'):>13}{_cell(summary.bubbles, 'generator', '.1%'):>15}"
            f"{_number(summary.overlap, '.1%'):>9}{summary.final_reward:>8.3f}"
            f"{_number(summary.max_gradient_gap, '.1e'):>13}"
        )
        if has_predictions:
            line += _compared(summary.step_s, None if summary.prediction is None else summary.prediction.step_s, 10, 8)
            line += _compared(summary.step_s, None if summary.prediction is None else summary.prediction.bound_s, 9, 9)
        if has_planner:
            line += f"{_number(summary.planner_error, '.1%'):>13}"
        lines.append(line)
    return "\n".join(lines)


def to_json(summaries: Sequence[Summary], runs: Sequence[RunResult], setting: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the table rests on."""
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


def _compared(step_s: float, known_s: float | None, width: int, gap_width: int) -> str:
    gap = None if known_s is None else step_s / known_s - 1
    return f"{_number(known_s, '.3f'):>{width}}{_number(gap, '+.1%'):>{gap_width}}"


def _colocated(summary: Summary) -> str:
    if COLOCATED in summary.speedup or summary.prediction is None or summary.prediction.colocated_s is None:
        return _cell(summary.speedup, COLOCATED, ".2f")
    return f"~{summary.prediction.colocated_s / summary.step_s:.2f}"


def _cell(values: Mapping[str, float], key: str, form: str) -> str:
    return format(values[key], form) if key in values else "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
