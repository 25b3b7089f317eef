# SPDX-License-Identifier: Apache-2.0
"""Do the same work under several placements and techniques, for real, and compare them.

    digen bench                                              the quick start's model, all modes
    digen bench --modes barrier,gap+tsp --steps 8 -- actor_rollout_ref.rollout.n=8
    digen simulate --run OUT/gap+tsp-1 --device H100         afterwards: other splits, on the durations of a run

Every run is verl's own main in a process of its own: the same prompts, seeds and steps. Runs are interleaved (A, B, C,
A, B, C), so that a machine that gets slower affects all modes alike; the first steps of each are left out, medians are
taken over the rest, and ratios repeat by repeat. What is after `--` goes to verl. --trainer and --generator give the
devices; a colocated run gets all of them, in turns. Without accelerators a device is an equal share of the cores.

| mode | pools | fragments train | rows | |
| --- | --- | --- | --- | --- |
| `colocated` | one, in turns | the batch in one call | samples sharded over ranks, one timestep per tile | |
| `colocated+tsp` | one, in turns | the batch in one call | in tiles of samples x timesteps | |
| `barrier` | two | the batch in one call, when it is complete | samples sharded over ranks, one timestep per tile | |
| `gap` | two | as soon as they are ready | samples sharded over ranks, one timestep per tile | |
| `gap+tsp` | two | as soon as they are ready | sharded over ranks, in tiles | |
| `gap+tsp+tag` | two | as soon as they are ready | sharded, in tiles | the trainer assists where a search says so |
| `gap+tsp+tag+tcss` | two | as soon as they are ready | sharded, in tiles | and the next batch begins 1 version early |

All but the last are strict: every sample is generated under the weights that it trains. Modes are compared with the
best baseline, the fastest that overlaps nothing.
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from verl_digen.require import require
from verl_digen.tools.simulate.cluster import BARRIER, BASELINES, COLOCATED, COLOCATED_TSP

NAME = "bench"
RECIPE = "digen_quickstart"
NORM, PROJECTION = "actor/grad_norm", "actor/grad_projection"
"""Compared between modes: equal work gives equal gradients, step by step. A norm alone would not show a reversed
gradient."""
COLUMNS = {
    "s/step": "perf/step_s",
    "images/s": "perf/images_per_s",
    "trainer idle": "perf/bubble_fraction/trainer",
    "generator idle": "perf/bubble_fraction/generator",
    "reward": "reward/mean",
}
"""Column of the table -> metric, whose median it shows."""


@dataclass(frozen=True)
class Mode:
    """One way to do the work: a few overrides."""

    name: str
    recipes: tuple[str, ...]
    """Recipes that come after the run's own recipe."""
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    mode: str
    repeat: int
    run_dir: str
    steps: tuple[Mapping[str, float], ...]
    """The metrics of each step, from `metrics.jsonl`."""
    wall_s: float
    """Wall time of the run, start-up included."""


def _tsp(is_on: bool) -> tuple[str, ...]:
    if is_on:
        return ("digen.tsp.enable=true",)
    return "digen.tsp.enable=false", "digen.tsp.steps_per_tile=auto"  # a number the user gives is for tiles


def _separate(*techniques: str) -> Mode:
    switches = [f"digen.gap.enable={str('gap' in techniques).lower()}", *_tsp("tsp" in techniques)]
    switches.append(f"digen.tag.policy={'bts' if 'tag' in techniques else 'off'}")
    switches.append(f"digen.staleness.max_versions={int('tcss' in techniques)}")
    return Mode("+".join(techniques) or BARRIER, ("disaggregated",), tuple(switches))


MODES = {
    mode.name: mode
    for mode in (
        Mode(COLOCATED, (), _tsp(False)),
        Mode(COLOCATED_TSP, (), _tsp(True)),
        _separate(),
        _separate("gap"),
        _separate("gap", "tsp"),
        _separate("gap", "tsp", "tag"),
        _separate("gap", "tsp", "tag", "tcss"),
    )
}
"""Name -> mode, in the order of the table."""


def run_dir_of(out: Path, mode: Mode, repeat: int) -> Path:
    return out / f"{mode.name}-{repeat + 1}"


def run_mode(mode: Mode, repeat: int, out: Path, *, recipe: str, overrides: Sequence[str], num_steps: int) -> RunResult:
    """Run one mode to its end. `recipe`: the algorithm's; `overrides`: given last, so they win over the mode's. Raises
    RunFailed: see `train`."""
    from verl_digen.tools.checkup.training import RunFailed, train  # imports verl

    run_dir, began_s = run_dir_of(out, mode, repeat).absolute(), time.monotonic()
    words = (*mode.overrides, "digen.report=false", *overrides)
    try:
        steps = train("+".join((recipe, *mode.recipes)), words, num_steps, run_dir)
    except RunFailed as failed:
        raise RunFailed(f"{mode.name}, repeat {repeat + 1}: {failed}") from None
    return RunResult(mode.name, repeat, str(run_dir), steps, time.monotonic() - began_s)


def summarise(runs: Sequence[RunResult], num_warm_up: int) -> dict[str, dict[str, float]]:
    """Mode -> medians over the measured steps of all its runs, its speed-up over each baseline (`x NAME`), and the
    largest relative difference of a step's gradient to the first run (`gradient gap`)."""
    by_mode: dict[str, list[RunResult]] = {}
    for run in sorted(runs, key=lambda run: run.repeat):
        by_mode.setdefault(run.mode, []).append(run)
    step_s = {
        name: {run.repeat: median(row["perf/step_s"] for row in run.steps[num_warm_up:]) for run in of_mode}
        for name, of_mode in by_mode.items()
    }
    first, found = next(iter(by_mode.values()))[0], {}
    for name, of_mode in by_mode.items():
        measured = [row for run in of_mode for row in run.steps[num_warm_up:]]
        found[name] = {
            column: median(row[metric] for row in measured)
            for column, metric in COLUMNS.items()
            if all(metric in row for row in measured)
        }
        found[name] |= {"lowest": min(step_s[name].values()), "highest": max(step_s[name].values())}
        for baseline in filter(step_s.__contains__, BASELINES):
            ratios = [step_s[baseline][repeat] / seconds for repeat, seconds in step_s[name].items()]
            found[name][f"x {baseline}"] = median(ratios)
        if all(NORM in row for run in of_mode for row in run.steps):
            found[name]["gradient gap"] = max(
                abs(row[metric] - due[metric]) / max(due[NORM], 1e-30)
                for run in of_mode
                for row, due in zip(run.steps, first.steps, strict=True)
                for metric in (NORM, PROJECTION)
            )
    return found


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """The summary as text; `-` where a mode has no such number."""
    from pandas import DataFrame  # takes half a second

    return DataFrame.from_dict(dict(found), orient="index").to_string(float_format="{:.4g}".format, na_rep="-")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--modes", default=",".join(MODES), help="some of %(default)s (default: all)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each run (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each run left out (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each mode (default: %(default)s)")
    parser.add_argument("--recipe", default=RECIPE, help="the algorithm's (default: %(default)s)")
    parser.add_argument("--trainer", type=int, default=1, help="devices that train (default: %(default)s)")
    parser.add_argument("--generator", type=int, default=1, help="devices that generate (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: outputs/bench-DATE)")
    parser.add_argument("overrides", nargs="*", metavar="-- OVERRIDE", help="for verl, in every mode")


def run(args: Namespace) -> int:
    """Run the modes one after the other, and print the table after each whole repeat's file is written."""
    from verl_digen.tools.checkup.training import RunFailed  # imports verl

    out = args.out or Path("outputs") / f"bench-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    runs: list[RunResult] = []
    found: dict[str, dict[str, float]] = {}
    try:
        modes = _checked(args, out)
        for repeat in range(args.repeats):
            for mode in modes:
                devices = [f"trainer.n_gpus_per_node={args.trainer + args.generator}"]
                if "disaggregated" in mode.recipes:
                    devices = [f"trainer.n_gpus_per_node={args.trainer}"]
                    devices.append(f"actor_rollout_ref.rollout.n_gpus_per_node={args.generator}")
                work = {"recipe": args.recipe, "overrides": (*devices, *args.overrides), "num_steps": args.steps}
                runs.append(run_mode(mode, repeat, out, **work))
                step_s = median(row["perf/step_s"] for row in runs[-1].steps[args.warm_up :])
                print(f"{mode.name} #{repeat + 1}: {step_s:.3f} s/step, {runs[-1].wall_s:.0f} s in all", flush=True)
            found = summarise(runs, args.warm_up)
            saved = {"words": sys.argv[1:], "modes": found, "runs": list(map(asdict, runs))}
            (out / "bench.json").write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
    except RunFailed as error:
        print(f"digen bench: {error}", file=sys.stderr)
        return 1
    finally:
        if found:  # of whole repeats, whatever happened to the next one
            print(f"\n{table(found)}\n\n{out / 'bench.json'}")
    return 0


def _checked(args: Namespace, out: Path) -> list[Mode]:
    """The modes to run. Raises ValueError: an option has a value that it cannot have."""
    names = args.modes.split(",")
    for name in names:
        require(name in MODES, f"--modes must be among {', '.join(MODES)}", name, "choose some of these")
    require(len(set(names)) == len(names), "--modes must name a mode once", args.modes, "use --repeats to run it again")
    require(args.steps > args.warm_up >= 0, "--steps must be > --warm-up >= 0", (args.steps, args.warm_up), "do more")
    for option in ("repeats", "trainer", "generator"):
        require(getattr(args, option) >= 1, f"--{option} must be >= 1", getattr(args, option), "give a number")
    for word in args.overrides:
        require("=" in word or word.startswith("~"), "overrides must be KEY=VALUE", word, "see --help")
    require(
        not (out.exists() and any(out.iterdir())), "--out must be a new or an empty folder", str(out), "name another"
    )
    return [MODES[name] for name in names]
