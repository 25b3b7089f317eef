# SPDX-License-Identifier: Apache-2.0
"""Do stale samples learn as well? The quick start on separate pools, strict and asynchronous, over several seeds.

    python examples/learning_curves.py [--seeds 3] [--steps 60] [--out outputs/learning_curves]

| curve | samples are | loss |
| --- | --- | --- |
| strict | of the newest weights | flow_grpo |
| TCSS | at most one version old | flow_grpo, its ratio against the log-probs of generation |
| 3 versions, tis | at most three versions old | tis |

Writes learning_curves.png (mean over the seeds, the band is their spread) and .json, and prints a table. Finished runs
are not run again, one that was cut short starts afresh. About 3 minutes a run on 2 CPU cores; `make quickstart` before,
for its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean

import matplotlib

from verl_digen.bench.modes import Mode
from verl_digen.bench.runs import BenchWork, read_steps, run_dir_of, run_mode

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAST_STEPS = 10
"""Last steps whose mean reward the table shows."""
SMOOTHING_STEPS = 5
"""The pictures of a step are of 8 prompts only: curves show the mean over this many steps."""


def curve(name: str, *overrides: str) -> Mode:
    return Mode(name, ("disaggregated",), overrides, ("gap", "tsp"))


CURVES = {
    "strict": curve("strict"),
    "TCSS": curve("tcss", "digen.staleness.max_versions=1"),
    "3 versions, tis": curve("tis3", "digen.staleness.max_versions=3", "digen.loss.name=tis"),
}
"""Name in the picture -> mode."""

Steps = Sequence[tuple[float, float]]
"""(seconds since training began, mean reward) at the end of each step."""


def steps_of(mode: Mode, seed: int, num_steps: int, out: Path) -> Steps:
    """Steps of one run, which is made if it is not there."""
    run_dir = run_dir_of(out, mode, seed)
    rows = read_steps(run_dir)
    if len(rows) != num_steps:
        if run_dir.exists():
            print(f"{run_dir} was cut short after {len(rows)} of {num_steps} steps and starts afresh", flush=True)
            shutil.rmtree(run_dir)
        work = BenchWork(("digen_quickstart",), (), (f"digen.seed={seed}",), num_steps)
        rows = run_mode(work, mode, seed, out).steps
        reward = mean(row["reward/mean"] for row in rows[-LAST_STEPS:])
        print(f"{mode.name}, seed {seed}: reward {reward:.3f}", flush=True)
    ends_s = accumulate(row["perf/step_s"] for row in rows)
    return [(end_s, row["reward/mean"]) for end_s, row in zip(ends_s, rows, strict=True)]


def smooth(values: Sequence[float]) -> list[float]:
    """Trailing means."""
    return [mean(values[max(0, index + 1 - SMOOTHING_STEPS) : index + 1]) for index in range(len(values))]


def draw(runs: dict[str, list[Steps]], path: Path) -> None:
    """Reward over steps and over seconds."""
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for name, of_seeds in runs.items():
        rewards = [smooth([reward for _, reward in steps]) for steps in of_seeds]
        middle, low, high = ([f(values) for values in zip(*rewards, strict=True)] for f in (mean, min, max))
        times_s = [mean(values) for values in zip(*([end_s for end_s, _ in steps] for steps in of_seeds), strict=True)]
        for axes, x in ((by_step, range(1, len(middle) + 1)), (by_time, times_s)):
            (line,) = axes.plot(x, middle, label=name)
            axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    by_step.set(xlabel="optimizer step", ylabel=f"mean reward (of {SMOOTHING_STEPS} steps)")
    by_time.set(xlabel="seconds of training")
    by_step.legend(loc="lower right")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("outputs/learning_curves"))
    args = parser.parse_args()
    out = args.out / f"{args.steps}_steps"
    runs: dict[str, list[Steps]] = {name: [] for name in CURVES}
    for seed in range(args.seeds):
        for name, mode in CURVES.items():
            runs[name].append(steps_of(mode, seed, args.steps, out))
    draw(runs, out / "learning_curves.png")
    (out / "learning_curves.json").write_text(json.dumps(runs) + "\n", encoding="utf-8")
    print(f"{'':<18}{'reward (seeds)':<26}{'s/step':>8}")
    for name, of_seeds in runs.items():
        last = [mean(reward for _, reward in steps[-LAST_STEPS:]) for steps in of_seeds]
        step_s = mean(steps[-1][0] / len(steps) for steps in of_seeds)
        spread = f"{mean(last):.3f} ({min(last):.3f}..{max(last):.3f})"
        print(f"{name:<18}{spread:<26}{step_s:>8.2f}")
    print(out / "learning_curves.png")


if __name__ == "__main__":
    main()
