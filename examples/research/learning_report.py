# SPDX-License-Identifier: Apache-2.0
"""Report of learning curves: points as JSON, a table, a picture. Pure but for the files it writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TARGET = 0.79
"""Validation reward of the quick start (flow_grpo) after its 60 steps, mean over three seeds."""
LAST_STEPS = 5
"""Last steps whose mean training reward the table shows."""
SMOOTHING_STEPS = 5
"""Training rewards of a step are of 8 prompts alone: curves show the mean over this many steps."""
SAMPLES_PER_STEP = 8 * 12
REFERENCE = "flow_grpo"
"""Curve that every panel shows, if it is there."""


@dataclass(frozen=True)
class Run:
    """Points of one run."""

    train: tuple[float, ...]
    """Mean reward of each step's samples."""
    val: tuple[tuple[int, float], ...]
    """(steps done, mean reward of the validation prompts)."""
    step_s: tuple[float, ...]
    """Wall seconds of each step, validation and checkpoints excluded."""


@dataclass(frozen=True)
class Curve:
    """All runs of one objective."""

    name: str
    panel: str
    runs: Mapping[int, Run]
    """Seed -> run; all have the same steps."""
    step_s: float
    """Median seconds of a step."""
    is_timed: bool
    """True if `step_s` was measured alone, on an idle machine."""


def cut(run: Run, num_steps: int) -> Run:
    """First steps of a run."""
    return Run(
        run.train[:num_steps], tuple(point for point in run.val if point[0] <= num_steps), run.step_s[:num_steps]
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Trailing means."""
    return [mean(values[max(0, index + 1 - SMOOTHING_STEPS) : index + 1]) for index in range(len(values))]


def validations(curve: Curve) -> list[tuple[int, list[float]]]:
    """(steps done, reward of each seed) of every validation."""
    return [
        (points[0][0], [reward for _, reward in points])
        for points in zip(*(run.val for run in curve.runs.values()), strict=True)
    ]


def steps_to(curve: Curve, target: float) -> int | None:
    """Steps until the mean over the seeds reaches `target` in a validation; None: it does not."""
    return next((step for step, rewards in validations(curve) if mean(rewards) >= target), None)


def table(curves: Sequence[Curve]) -> str:
    """Markdown table, a line per curve."""
    names = (
        "objective",
        "seeds",
        "before",
        "after (seeds)",
        "training",
        f"steps to {TARGET}",
        "s/step",
        f"s to {TARGET}",
    )
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    for curve in curves:
        points = validations(curve)
        last = points[-1][1]
        trained = mean(mean(run.train[-LAST_STEPS:]) for run in curve.runs.values())
        steps = steps_to(curve, TARGET)
        cells = [
            f"`{curve.name}`" if "," not in curve.name else curve.name,
            str(len(curve.runs)),
            f"{mean(points[0][1]):.3f}",
            f"{mean(last):.3f} ({min(last):.3f} to {max(last):.3f})" if len(last) > 1 else f"{last[0]:.3f}",
            f"{trained:.3f}",
            "-" if steps is None else str(steps),
            f"{curve.step_s:.2f}" + ("" if curve.is_timed else "*"),
            "-" if steps is None else f"{steps * curve.step_s:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if not all(curve.is_timed for curve in curves):
        lines += ["", "\\* measured on a machine with other work: compare it with nothing."]
    return "\n".join(lines) + "\n"


def as_json(curves: Sequence[Curve], num_steps: int) -> dict[str, Any]:
    """Points of all curves, rewards with four digits."""
    return {
        "steps": num_steps,
        "curves": [
            {
                "name": curve.name,
                "panel": curve.panel,
                "step_s": curve.step_s,
                "is_timed": curve.is_timed,
                "runs": {
                    str(seed): {
                        "train": [round(reward, 4) for reward in run.train],
                        "val": [[step, round(reward, 4)] for step, reward in run.val],
                    }
                    for seed, run in curve.runs.items()
                },
            }
            for curve in curves
        ],
    }


def from_json(data: Mapping[str, Any]) -> list[Curve]:
    """Curves as they were written; their runs have no seconds of single steps."""
    return [
        Curve(
            curve["name"],
            curve["panel"],
            {
                int(seed): Run(tuple(run["train"]), tuple((step, reward) for step, reward in run["val"]), ())
                for seed, run in curve["runs"].items()
            },
            curve["step_s"],
            curve["is_timed"],
        )
        for curve in data["curves"]
    ]


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Picture with a row per panel: validation over steps, training over steps, validation over seconds."""
    panels = list(dict.fromkeys(curve.panel for curve in curves))
    reference = [curve for curve in curves if curve.name == REFERENCE]
    figure, rows = plt.subplots(
        len(panels), 3, figsize=(13, 3.7 * len(panels)), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (by_step, training, by_time) in zip(panels, rows, strict=True):
        others = [curve for curve in curves if curve.panel == panel and curve.name != REFERENCE]
        for curve in (*reference, *others):
            style = {"color": "black", "linestyle": "--"} if curve.name == REFERENCE else {}
            steps = [step for step, _ in validations(curve)]
            rewards = [rewards for _, rewards in validations(curve)]
            smoothed = list(zip(*(smooth(run.train) for run in curve.runs.values()), strict=True))
            label = f"{curve.name} ({len(curve.runs)})"
            _band(by_step, steps, rewards, label, style)
            _band(training, range(1, len(smoothed) + 1), smoothed, label, style)
            _band(by_time, [step * curve.step_s for step in steps], rewards, label, style)
        by_step.set(ylabel=f"{panel}\nvalidation reward", xlabel="training step")
        samples = by_step.secondary_xaxis("top", functions=(_to_samples, _to_steps))
        samples.set_xlabel("samples")
        training.set(ylabel=f"training reward (of {SMOOTHING_STEPS} steps)", xlabel="training step")
        by_time.set(xlabel="seconds of training (steps x median of a step)")
        by_step.legend(loc="lower right", fontsize="small")
        for axes in (by_step, training, by_time):
            axes.axhline(TARGET, color="grey", linewidth=0.7, linestyle=":")
            axes.grid(alpha=0.3)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _to_samples(steps: Any) -> Any:
    return steps * SAMPLES_PER_STEP


def _to_steps(samples: Any) -> Any:
    return samples / SAMPLES_PER_STEP


def _band(axes: Any, x: Sequence[float], of_seeds: Sequence[Sequence[float]], label: str, style: Any) -> None:
    """Line of the means; the band is from the lowest to the highest seed."""
    (line,) = axes.plot(x, [mean(rewards) for rewards in of_seeds], label=label, **style)
    lows, highs = ([pick(rewards) for rewards in of_seeds] for pick in (min, max))
    axes.fill_between(x, lows, highs, color=line.get_color(), alpha=0.12, linewidth=0)


def put_table(text: str, name: str, new: str) -> str:
    """`text` with the table between its marks `<!-- NAME -->` and `<!-- end -->` replaced.

    Raises:
        ValueError: a mark is missing.
    """
    begin, end = f"<!-- {name} -->\n", "<!-- end -->"
    before, mark, rest = text.partition(begin)
    _, end_mark, after = rest.partition(end)
    if not mark or not end_mark:
        raise ValueError(f"learning.md must have the lines {begin.strip()} and {end} around the table {name}")
    return before + begin + new + end + after


def write_report(curves: Sequence[Curve], num_steps: int, out: Path, name: str, docs: Path | None) -> None:
    """Write NAME.json, .md and .png into `out`, and into the documents' folder if there is one."""
    points = json.dumps(as_json(curves, num_steps), separators=(",", ":")) + "\n"
    rows = table(from_json(json.loads(points)))
    for folder in (out,) if docs is None else (out, docs):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(points, encoding="utf-8")
        draw(curves, folder / f"{name}.png")
    (out / f"{name}.md").write_text(rows, encoding="utf-8")
    if docs is not None:
        page = docs / "learning.md"
        page.write_text(put_table(page.read_text(encoding="utf-8"), name, rows), encoding="utf-8")
    print(rows + str(out / f"{name}.png"), flush=True)
