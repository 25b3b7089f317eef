# SPDX-License-Identifier: Apache-2.0
"""Learning curves of all objectives: the quick start with each of them, over several seeds.

    python examples/research/learning_curves.py [--objectives awm,dgpo] [--seeds 3] [--steps 25] [--out DIR]
    python examples/research/learning_curves.py --staleness 2   # two pools: strict, and at most two versions old
    python examples/research/learning_curves.py --timing        # seconds of a step alone; on an idle machine
    python examples/research/learning_curves.py --no-runs --docs docs/algorithms  # report of the runs that are there

Runs follow one another, 2 to 3 minutes each on 2 idle CPU cores. Finished ones are not run again (a longer one serves,
too, and takes the place of a shorter one when it has ended), one that was cut short starts afresh, and one that fails
is told at the end. Writes learning.json (all points), .png and .md (the table); learning_long.* of runs of 60 steps, if
there are any, and learning_stale.* of two pools. `--docs` puts learning.* into that folder. Seconds of training are the
number of steps times the median seconds of a step, without validation: that of `--timing`, where it was measured.

A further objective is a line in `CURVES`. `make quickstart` before, for the environment.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from learning_report import Curve, Run, cut, write_report

from verl_digen.observe.run_files import METRICS, read_lines
from verl_digen.tools.bench import Mode, run_dir_of, run_mode
from verl_digen.tools.checkup.training import RunFailed

QUICKSTART = "digen_quickstart"
LONG_STEPS = 60
"""Steps of the quick start; curves of runs of that many have a table and a picture of their own."""
VALIDATE_EVERY = 5
"""Steps between validations. The quick start has 20."""
TIMED_STEPS = 12
UNFINISHED = "unfinished"
"""Folder of runs that have not ended, within that of the finished ones."""
NUM_WARM_UP = 2
"""First steps of a timed run that are left out."""

PATH, FORWARD = "losses of log-probs", "losses at forward points"

SIZES = ("data.train_batch_size=8", "actor_rollout_ref.rollout.n=12", "actor_rollout_ref.actor.optim.lr=3e-4")
"""Sizes and learning rate of the quick start, for recipes that bring those of a large model."""
TWO_STEPS = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
"""Two optimizer steps for a batch: in the first one every ratio is 1, and all of these losses have one gradient."""
TEN_STEPS = "digen.sampling.num_steps=10"
TREE = (
    "data.train_batch_size=12",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.optim.lr=3e-4",
    "digen.branches.splits=[0,2,4]",
    TEN_STEPS,
)
"""Trees of eight leaves, as many samples a step as the others have."""


@dataclass(frozen=True)
class Entry:
    """A way to train the quick start's model."""

    objective: str
    """`digen.loss.name`."""
    panel: str
    recipes: tuple[str, ...] = ()
    """Recipes after the quick start's."""
    overrides: tuple[str, ...] = ()


def loss(name: str, *overrides: str) -> Entry:
    """Entry of an objective that needs no recipe."""
    return Entry(name, PATH, (), (f"digen.loss.name={name}", *overrides))


CURVES = {
    "flow_grpo": Entry("flow_grpo", PATH),
    "diffusion_nft": Entry("diffusion_nft", FORWARD, ("nft",)),
    "awm": Entry("awm", FORWARD, ("awm",)),
    "dgpo": Entry("dgpo", FORWARD, ("dgpo",)),
    "online_dpo": Entry("online_dpo", FORWARD, ("dpo",)),
    "awm_off_policy": Entry("awm_off_policy", FORWARD, ("awm",), ("digen.loss.name=awm_off_policy",)),
    # The window has six places in ten steps, and holds each for five optimizer steps.
    "mixgrpo": Entry("flow_grpo", PATH, ("mixgrpo",), (TEN_STEPS, "digen.window.shift_every=5")),
    "flowgrpo_fast": Entry("flow_grpo", PATH, ("flowgrpo_fast",)),
    "branch": Entry("flow_grpo", PATH, ("branch",), TREE),
    "grpo_guard": Entry("grpo_guard", PATH, ("guard",), (*SIZES, TWO_STEPS)),
    "flow_dppo": Entry("flow_dppo", PATH, ("dppo",), (*SIZES, TWO_STEPS)),
    "longcat": Entry("longcat", PATH, ("longcat",), (*SIZES, TEN_STEPS)),
    "gspo": loss("gspo", TWO_STEPS),
    "cispo": loss("cispo", TWO_STEPS),
}
"""Name -> entry, in the order of the runs."""

SAME_GRADIENT = "with new samples and one optimizer step its gradient is that of flow_grpo"
OMITTED = {
    "dance_grpo": "the loss of flow_grpo under another name; its SDE law and window belong to video models",
    "offline_dpo": "trains on pairs of a data set, not on rewards; its curve is in docs/algorithms/preferences.md",
    "opd": "needs a teacher; its curve is in docs/algorithms/distillation.md",
    **dict.fromkeys(("decoupled_ppo", "kimi", "reinforce", "tis", "topr", "weighted_topr"), SAME_GRADIENT),
}
"""Objective without a curve -> reason."""

STALE_OBJECTIVES = ("diffusion_nft", "awm", "dgpo")
"""Objectives that `--staleness` compares unless `--objectives` names others."""


def mode_of(name: str, staleness: int | None = None) -> Mode:
    """Mode of a curve.

    Args:
        staleness: `digen.staleness.max_versions` on separate pools; None: one pool.
    """
    entry = CURVES[name]
    if staleness is None:
        return Mode(name, entry.recipes, entry.overrides)
    overrides = [*entry.overrides, f"digen.staleness.max_versions={staleness}"]
    if name == "flow_grpo" and staleness > 1:  # which needs a loss for older samples
        overrides.append("digen.loss.name=tis")
    return Mode(f"{name}-pools-{staleness}", (*entry.recipes, "disaggregated"), tuple(overrides))


def read_run(run_dir: Path) -> Run:
    """Read a run's points from its folder; empty if it did not get that far."""
    rows = read_lines(run_dir / METRICS)
    steps = [row for row in rows if "perf/step_s" in row]
    return Run(
        train=tuple(row["reward/mean"] for row in steps),
        val=tuple((int(row["step"]), row["val/reward"]) for row in rows if "val/reward" in row),
        step_s=tuple(row["perf/step_s"] for row in steps),
    )


def ensure_run(mode: Mode, seed: int, num_steps: int, out: Path, *, validates: bool) -> Run:
    """Points of one run, which is made if it is not there.

    Raises:
        RunFailed: see `run_mode`.
    """
    run_dir = run_dir_of(out, mode, seed)
    run = read_run(run_dir)
    if len(run.train) < num_steps:
        overrides = [f"digen.seed={seed}"]
        if validates:
            overrides += [f"trainer.test_freq={VALIDATE_EVERY}", "trainer.val_before_train=true"]
        work = {"recipe": QUICKSTART, "overrides": overrides, "num_steps": num_steps}
        unfinished = run_dir_of(out / UNFINISHED, mode, seed)
        if unfinished.exists():
            print(f"{unfinished} did not end and starts afresh", flush=True)
            shutil.rmtree(unfinished)
        wall_s = run_mode(mode, seed, out / UNFINISHED, **work).wall_s
        if run_dir.exists():  # a shorter run
            shutil.rmtree(run_dir)
        unfinished.replace(run_dir)
        run = read_run(run_dir)
        shown = f"validation {run.val[0][1]:.3f} to {run.val[-1][1]:.3f}, " if validates else ""
        print(f"{mode.name}, seed {seed}: {shown}{median(run.step_s):.2f} s a step, {wall_s:.0f} s in all", flush=True)
    return run


def run_all(modes: Iterable[Mode], seeds: Iterable[int], num_steps: int, out: Path, *, validates: bool) -> list[str]:
    """Make every run that is missing -> messages of those that failed."""
    failures, all_modes = [], list(modes)
    for seed in seeds:
        for mode in all_modes:
            try:
                ensure_run(mode, seed, num_steps, out, validates=validates)
            except RunFailed as failure:
                print(f"{mode.name}, seed {seed}: failed", flush=True)
                failures.append(str(failure))
    return failures


def curve_of(label: str, panel: str, mode: Mode, num_steps: int, runs: Path, timing: Path) -> Curve | None:
    """Curve of all finished runs of a mode; None if there is none."""
    found: dict[int, Run] = {}
    for run_dir in sorted(runs.glob(f"{mode.name}-*")):
        number = run_dir.name.removeprefix(f"{mode.name}-")
        if number.isdigit():
            run = read_run(run_dir)
            if len(run.train) >= num_steps and run.val:
                found[int(number) - 1] = cut(run, num_steps)
    if not found:
        return None
    timed = read_run(run_dir_of(timing, mode, 0)).step_s
    is_timed = len(timed) >= TIMED_STEPS
    step_s = median(timed[NUM_WARM_UP:]) if is_timed else median(s for run in found.values() for s in run.step_s)
    return Curve(label, panel, found, round(step_s, 3), is_timed)


def strict_curves(num_steps: int, runs: Path, timing: Path) -> list[Curve]:
    """Curves of all finished runs on one pool."""
    curves = [curve_of(name, entry.panel, mode_of(name), num_steps, runs, timing) for name, entry in CURVES.items()]
    return [curve for curve in curves if curve is not None]


def stale_curves(num_steps: int, runs: Path, timing: Path) -> list[Curve]:
    """Curves of all finished runs on two pools, with samples of any age: a panel per objective."""
    curves = []
    for name in CURVES:
        found = {int(run_dir.name.split("-")[-2]) for run_dir in runs.glob(f"{name}-pools-*-*")}
        for age in sorted(found):
            label = "strict" if age == 0 else f"at most {age} version{'s'[: age > 1]} old"
            label += ", tis" if name == "flow_grpo" and age > 1 else ""
            curves.append(curve_of(f"{name}, {label}", name, mode_of(name, age), num_steps, runs, timing))
    return [curve for curve in curves if curve is not None]


def write_timing(curves: Sequence[Curve], path: Path) -> None:
    """Write the seconds of a step that `--timing` measured."""
    seconds: Mapping[str, float] = {curve.name: curve.step_s for curve in curves if curve.is_timed}
    path.write_text(json.dumps(seconds, indent=1) + "\n", encoding="utf-8")


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", help="names of curves, joined by commas; all without it")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--staleness", type=int, help="digen.staleness.max_versions, compared with 0 on two pools")
    parser.add_argument("--timing", action="store_true", help=f"measure {TIMED_STEPS} steps of seed 0, not rewards")
    parser.add_argument("--no-runs", action="store_true", help="report of the runs that are there")
    parser.add_argument("--out", type=Path, default=Path("outputs/learning_curves"))
    parser.add_argument("--docs", type=Path, help="folder with learning.md, whose table and pictures are replaced")
    args = parser.parse_args(words)
    args.names = args.objectives.split(",") if args.objectives else list(CURVES)
    if args.staleness is not None and not args.objectives:
        args.names = list(STALE_OBJECTIVES)
    unknown = [name for name in args.names if name not in CURVES]
    if unknown:
        parser.error(f"--objectives must be among {', '.join(CURVES)}, got {', '.join(unknown)}")
    if args.seeds < 1:
        parser.error(f"--seeds must be >= 1, got {args.seeds}")
    if args.steps < VALIDATE_EVERY or args.steps % VALIDATE_EVERY:
        parser.error(f"--steps must be a multiple of {VALIDATE_EVERY}, the steps between validations, got {args.steps}")
    if args.staleness is not None and args.staleness < 1:
        parser.error(f"--staleness must be >= 1 version, got {args.staleness}; the strict runs are made beside it")
    return args


def main() -> None:
    args = parse_args()
    ages = (None,) if args.staleness is None else (0, args.staleness)
    modes = [mode_of(name, age) for name in args.names for age in ages]
    runs, timing = args.out / "runs", args.out / "timing"
    failures: list[str] = []
    if not args.no_runs and args.timing:
        failures = run_all(modes, [0], TIMED_STEPS, timing, validates=False)
    elif not args.no_runs:
        failures = run_all(modes, range(args.seeds), args.steps, runs, validates=True)
    reports = {"learning": (strict_curves, args.steps), "learning_stale": (stale_curves, args.steps)}
    if args.steps < LONG_STEPS:
        reports["learning_long"] = strict_curves, LONG_STEPS
    curves = []
    for name, (collect, num_steps) in reports.items():
        found = collect(num_steps, runs, timing)
        if found:
            write_report(found, num_steps, args.out, name, args.docs if name == "learning" else None)
        curves += found
    write_timing(curves, args.out / "timing.json")
    sys.exit("\n\n".join(failures) if failures else 0)


if __name__ == "__main__":
    main()
