# SPDX-License-Identifier: Apache-2.0
"""Do the same work under several placements and techniques, for real, and compare them.

Every run is verl's own main in a process of its own: the same prompts, seeds and steps. Runs are interleaved (A, B, C,
A, B, C), the first steps of each are left out, medians are taken over the rest.

    digen bench                                              the quick-start model, all modes
    digen bench --modes barrier,gap+tsp --steps 8 -- actor_rollout_ref.rollout.n=8
    digen simulate --run OUT/gap+tsp-1 --device H100         afterwards: other splits, on the durations of a run

What is after `--` goes to verl. --trainer and --generator give the devices. A colocated run gets all of them,
in turns: as many ranks and as many replicas as devices. Without accelerators a device is an equal share of the cores:
on 2 cores a colocated run has two ranks and two replicas of one core each, any other mode a rank and a replica. Modes
are compared with the best baseline, the fastest that overlaps nothing. images/s per device are over all devices, those
of rewards included.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from verl_digen.require import require
from verl_digen.tools.bench.modes import MODES, Mode, interleaved, parse_modes
from verl_digen.tools.bench.runs import BenchWork, RunFailed, RunResult, run_mode

NAME = "bench"

RECIPE = "digen_quickstart"


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
    out = args.out or Path("outputs") / f"bench-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    if out.exists() and any(out.iterdir()):
        print(f"digen bench: --out must be a new or an empty folder, got {str(out)!r}; name another", file=sys.stderr)
        return 2
    try:
        modes = _modes(args)
        setup = _setup(args)
    except ValueError as error:
        print(f"digen bench: {error}", file=sys.stderr)
        return 2
    order = interleaved(modes, args.repeats)
    print(f"{len(order)} runs of {args.steps} steps; what each prints is in {out}/MODE-REPEAT/console.log", flush=True)
    runs: list[RunResult] = []
    try:
        for repeat, mode in order:
            runs.append(run_mode(_for_mode(setup, mode), mode, repeat, out))
            print(_progress(runs[-1], len(runs), len(order), args.warm_up), flush=True)
    except (RunFailed, KeyboardInterrupt) as stopped:
        whole = runs[: len(runs) // len(modes) * len(modes)]
        if whole:
            print(f"\nonly {len(whole) // len(modes)} of {args.repeats} repeats are whole:")
            _report(args, whole, setup, out)
        if isinstance(stopped, KeyboardInterrupt):
            raise
        print(f"digen bench: {stopped}", file=sys.stderr)
        return 1
    return _report(args, runs, setup, out)


def _modes(args: Namespace) -> list[Mode]:
    """The modes to run; ValueError if one cannot run."""
    modes = parse_modes(args.modes)
    require(args.steps > args.warm_up >= 0, "--steps must be > --warm-up >= 0", (args.steps, args.warm_up), "do more")
    require(args.repeats >= 1, "--repeats must be >= 1", args.repeats, "3 show the spread")
    for word in args.overrides:
        require("=" in word or word.startswith("~"), "overrides must be KEY=VALUE", word, "see --help")
    for option, number in (("--trainer", args.trainer), ("--generator", args.generator)):
        require(number >= 1, f"{option} must be >= 1", number, "give a number of devices")
    return modes


@dataclass(frozen=True)
class BenchSetup:
    """The work and the devices of all modes."""

    work: BenchWork
    num_trainer: int
    num_generator: int
    num_reward_devices: int
    """Devices of rewards, beside the two pools'; every mode has them."""

    @property
    def num_shared(self) -> int:
        """Devices that a colocated run takes in turns."""
        return self.num_trainer + self.num_generator

    @property
    def num_devices(self) -> int:
        """Devices of all pools, whichever of them a mode leaves idle."""
        return self.num_shared + self.num_reward_devices


def _setup(args: Namespace) -> BenchSetup:
    from verl_digen.pool_sizes import num_reward_devices

    work = BenchWork((args.recipe,), tuple(args.overrides), args.steps)
    config = compose_bench(work.recipes, work.overrides)
    return BenchSetup(work, args.trainer, args.generator, num_reward_devices(config))


def compose_bench(recipes: Sequence[str], overrides: Sequence[str]) -> Any:
    """Compose the config that the modes share.

    Raises:
        ValueError: Hydra cannot compose it; with the first line of Hydra's message.
    """
    import verl  # noqa: F401 - loads the plugin, and with it the recipes; imports torch
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    with initialize_config_module("verl.trainer.config", version_base=None):
        try:
            return compose("ppo_trainer", overrides=[f"recipe={'+'.join(recipes)}", *overrides])
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(f"the config cannot be composed: {str(error).strip().splitlines()[0]}") from error


def _for_mode(setup: BenchSetup, mode: Mode) -> BenchWork:
    """The work, on the devices of a mode."""
    if mode.is_disaggregated:
        devices = (
            f"trainer.n_gpus_per_node={setup.num_trainer}",
            f"actor_rollout_ref.rollout.n_gpus_per_node={setup.num_generator}",
        )
    else:
        devices = (f"trainer.n_gpus_per_node={setup.num_shared}",)
    return replace(setup.work, overrides=(*devices, *setup.work.overrides))


def _is_cpu() -> bool:
    from verl.plugin.platform import get_platform  # imports torch, and is asked when runs begin

    return get_platform().device_name == "cpu"


def _progress(run: RunResult, number: int, total: int, num_warm_up: int) -> str:
    measured = run.steps[num_warm_up:]
    step_s = median(row["perf/step_s"] for row in measured)
    images_per_s = median(row["perf/images_per_s"] for row in measured)
    return (
        f"run {number}/{total}: {run.mode.name} #{run.repeat + 1}: {step_s:.3f} s/step (median of {len(measured)}), "
        f"{images_per_s:.2f} images/s, {run.wall_s:.0f} s in all"
    )


def _report(args: Namespace, runs: list[RunResult], setup: BenchSetup, out: Path) -> int:
    from verl_digen.tools.bench.summary import summarise, table, to_json

    summaries = summarise(runs, num_warm_up=args.warm_up, num_devices=setup.num_devices)
    setting = _setting(args, setup, num_repeats=1 + max(run.repeat for run in runs))
    print()
    print(setting["devices"])
    print(table(summaries))
    path = out / "bench.json"
    path.write_text(json.dumps(to_json(summaries, runs, setting), indent=2) + "\n", encoding="utf-8")
    print(f"\n{path}")
    return 0


def _setting(args: Namespace, setup: BenchSetup, *, num_repeats: int) -> dict[str, Any]:
    """Conditions of the comparison."""
    num_cores = len(os.sched_getaffinity(0))
    pools = f"{args.trainer} trainer + {args.generator} generator"
    if _is_cpu():
        devices = f"{pools} on {num_cores} CPU cores; colocated: {setup.num_shared} ranks and replicas in turns"
    else:
        devices = f"{pools} devices; colocated: all {setup.num_shared} in turns"
    if setup.num_reward_devices:
        devices += f"; rewards: {setup.num_reward_devices} more"
    return {
        "devices": devices,
        "num_cpu_cores": num_cores,
        "recipe": args.recipe,
        "overrides": args.overrides,
        "num_steps": args.steps,
        "num_warm_up_steps": args.warm_up,
        "num_repeats": num_repeats,
        "num_devices": setup.num_devices,
        "versions": {name: version(name) for name in ("verl-digen", "verl", "torch", "ray")},
    }
