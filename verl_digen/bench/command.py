# SPDX-License-Identifier: Apache-2.0
"""Do the same work under several placements and techniques, for real, and compare them.

Every run is verl's own main in a process of its own: the same prompts, seeds and steps. Runs are interleaved (A, B, C,
A, B, C), the first steps of each are left out, medians are taken over the rest.

    digen bench                                              the quick-start model, all modes
    digen bench --modes barrier,gap+tsp --steps 8 -- actor_rollout_ref.rollout.n=8
    digen bench --peer --modes colocated+tsp,gap+tsp+tag
    digen bench --virtual wan2.1-14b --trainer 24 --generator 8 --time-scale 0.05
    digen bench --profile mine.json --device H100            and then: digen simulate --profile mine.json --devices 64

What is after `--` goes to verl. The devices are those of --trainer and --generator. A colocated run gets all of them,
in turns: as many ranks and as many replicas as devices. Without accelerators a device is an equal share of the cores:
on 2 cores a colocated run has two ranks and two replicas of one core each, any other mode a rank and a replica. Modes
are compared with the best baseline, the fastest that overlaps nothing.

--peer compares with a colocated run the way verl-omni's published recipe sets it, too: run on our engine with its
settings, and its window in every mode; or simulated with --virtual. images/s per device are over all devices, those of
rewards included.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from verl_digen.bench.modes import MODES, Mode, interleaved, parse_modes
from verl_digen.bench.runs import BenchWork, RunFailed, RunResult, run_mode
from verl_digen.bench.summary import Baseline, Prediction
from verl_digen.devices import Pool, parse_pool
from verl_digen.require import require
from verl_digen.simulate.cluster import Split

NAME = "bench"

RECIPE = "digen_quickstart"
VIRTUAL_RECIPE = "digen_flowgrpo"
VIRTUAL_OVERRIDES = (
    # of the model only the index is read; prompts are names here
    "actor_rollout_ref.model.path=examples/tiny_qwen_image/checkpoint",
    "data.train_files=examples/tiny_qwen_image/prompts/train.jsonl",
    "data.val_files=examples/tiny_qwen_image/prompts/val.jsonl",
)
"""Overrides of a virtual run, before the user's own: the files of the quick start, from the repository's folder."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--modes", default=",".join(MODES), help="some of %(default)s (default: all that can run)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each run (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each run left out (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each mode (default: %(default)s)")
    parser.add_argument("--recipe", help=f"the algorithm's (default: {RECIPE}; with --virtual {VIRTUAL_RECIPE})")
    parser.add_argument(
        "--trainer", default="1", help="devices that train (default: %(default)s); virtual ones of a type: 16xH800"
    )
    parser.add_argument("--generator", default="1", help="devices that generate (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: outputs/bench-DATE)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a measured profile for digen simulate")
    parser.add_argument("--device", help="type of the devices, named in the profile, e.g. H100")
    parser.add_argument("--virtual", metavar="PROFILE", help="on devices that only take the time of this profile")
    parser.add_argument("--peer", action="store_true", help="compare with verl-omni's way, too")
    parser.add_argument("--time-scale", type=float, default=1.0, help="of virtual devices (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="-- OVERRIDE", help="for verl, in every mode")


def run(args: Namespace) -> int:
    out = args.out or Path("outputs") / f"bench-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    if out.exists() and any(out.iterdir()):
        print(f"digen bench: --out must be a new or an empty folder, got {str(out)!r}; name another", file=sys.stderr)
        return 2
    try:
        modes = _modes(args)
        setup = _setup(args, modes)
    except ValueError as error:
        print(f"digen bench: {error}", file=sys.stderr)
        return 2
    all_modes = [*modes, *([] if setup.peer is None else [setup.peer])]
    order = interleaved(all_modes, args.repeats)
    print(f"{len(order)} runs of {args.steps} steps; what each prints is in {out}/MODE-REPEAT/console.log", flush=True)
    runs: list[RunResult] = []
    try:
        for repeat, mode in order:
            runs.append(run_mode(_for_mode(setup, mode), mode, repeat, out))
            print(_progress(runs[-1], len(runs), len(order), args.warm_up), flush=True)
    except (RunFailed, KeyboardInterrupt) as stopped:
        whole = runs[: len(runs) // len(all_modes) * len(all_modes)]
        if whole:
            print(f"\nonly {len(whole) // len(all_modes)} of {args.repeats} repeats are whole:")
            _report(args, whole, setup, out)
        if isinstance(stopped, KeyboardInterrupt):
            raise
        print(f"digen bench: {stopped}", file=sys.stderr)
        return 1
    return _report(args, runs, setup, out)


def _modes(args: Namespace) -> list[Mode]:
    """The modes to run; ValueError if one cannot run."""
    asked = args.modes
    if args.virtual is not None and asked == ",".join(MODES):
        asked = ",".join(name for name, mode in MODES.items() if mode.is_disaggregated)
    modes = parse_modes(asked)
    for mode in modes:
        require(
            args.virtual is None or mode.is_disaggregated,
            "--modes must have separate pools with --virtual",
            mode.name,
            "drop it: colocated baselines are simulated with every virtual run",
        )
    require(args.steps > args.warm_up >= 0, "--steps must be > --warm-up >= 0", (args.steps, args.warm_up), "do more")
    require(args.repeats >= 1, "--repeats must be >= 1", args.repeats, "3 show the spread")
    for word in args.overrides:
        require("=" in word or word.startswith("~"), "overrides must be KEY=VALUE", word, "see --help")
    require(args.time_scale > 0, "--time-scale must be > 0", args.time_scale, "1 is the profile's time")
    require(
        args.profile is None or args.device is not None,
        "--profile needs --device, the type of the devices that are measured",
        args.device,
        "name one that verl_digen/devices.py knows",
    )
    return modes


@dataclass(frozen=True)
class BenchSetup:
    """The work and the devices of all modes."""

    work: BenchWork
    split: Split
    num_reward_devices: int
    """Devices of rewards, beside those of the split; every mode has them."""
    peer: Mode | None
    """verl-omni's way, if it is run."""
    peer_s: float | None
    """Step time of verl-omni's way, if it is simulated."""
    predictions: Mapping[str, Prediction]
    """Mode -> its prediction, where devices are virtual."""
    baselines: Sequence[Baseline]
    """Simulated baselines, where devices are virtual."""

    @property
    def num_devices(self) -> int:
        """Devices of all pools, whichever of them a mode leaves idle."""
        return self.split.num_devices + self.num_reward_devices


def _setup(args: Namespace, modes: list[Mode]) -> BenchSetup:
    if args.virtual is None:
        return _real_setup(args)
    from verl_digen.bench.virtual import (
        predict,
        simulated_baselines,
        simulated_peer_s,
        virtual_overrides,
        virtual_split,
    )
    from verl_digen.simulate.profile import load_profile

    profile = load_profile(args.virtual)
    split = virtual_split(
        profile,
        parse_pool("--trainer", args.trainer, default_device=profile.device),
        parse_pool("--generator", args.generator, default_device=profile.device),
    )
    overrides = (*VIRTUAL_OVERRIDES, *virtual_overrides(profile, args.virtual, split, args.time_scale))
    return BenchSetup(
        work=BenchWork((args.recipe or VIRTUAL_RECIPE,), ("virtual",), (*overrides, *args.overrides), args.steps),
        split=split,
        num_reward_devices=0,
        peer=None,
        peer_s=simulated_peer_s(profile, split, args.time_scale) if args.peer else None,
        predictions={mode.name: predict(profile, split, mode, args.time_scale) for mode in modes},
        baselines=simulated_baselines(profile, split, args.time_scale),
    )


def _real_setup(args: Namespace) -> BenchSetup:
    from verl_digen.bench.peer import SAME_WINDOW, compose_bench, peer_mode
    from verl_digen.pool_sizes import num_reward_devices

    require(args.time_scale == 1.0, "--time-scale needs --virtual", args.time_scale, "real devices take their time")
    split = Split(_real_pool("--trainer", args.trainer), _real_pool("--generator", args.generator))
    recipes, overrides = (args.recipe or RECIPE,), (*(SAME_WINDOW if args.peer else ()), *args.overrides)
    config = compose_bench(recipes, overrides)
    return BenchSetup(
        work=BenchWork(recipes, (), overrides, args.steps),
        split=split,
        num_reward_devices=num_reward_devices(config),
        peer=peer_mode(config.data.train_batch_size) if args.peer else None,
        peer_s=None,
        predictions={},
        baselines=(),
    )


def _real_pool(option: str, text: str) -> Pool:
    require(text.isdecimal(), f"{option} must be a number of devices", text, "types are those of virtual devices")
    return parse_pool(option, text, default_device="CPU")


def _for_mode(setup: BenchSetup, mode: Mode) -> BenchWork:
    """The work, on the devices of a mode."""
    work = setup.work
    if setup.predictions:
        return work
    if mode.is_disaggregated:
        devices = (
            f"trainer.n_gpus_per_node={setup.split.trainer.num_devices}",
            f"actor_rollout_ref.rollout.n_gpus_per_node={setup.split.generator.num_devices}",
        )
    else:
        devices = (f"trainer.n_gpus_per_node={setup.split.num_devices}",)
    return BenchWork(work.recipes, work.last_recipes, (*devices, *work.overrides), work.num_steps)


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
    from verl_digen.bench.summary import summarise, table, to_json

    summaries = summarise(
        runs,
        num_warm_up=args.warm_up,
        num_devices=setup.num_devices,
        peer_s=setup.peer_s,
        predictions=setup.predictions,
        simulated=setup.baselines,
    )
    setting = _setting(args, setup, num_repeats=1 + max(run.repeat for run in runs))
    print()
    print(setting["devices"])
    print(table(summaries))
    path = out / "bench.json"
    path.write_text(json.dumps(to_json(summaries, runs, setting), indent=2) + "\n", encoding="utf-8")
    print(f"\n{path}")
    if args.profile is not None:
        from verl_digen.bench.measured_profile import measured_profile

        try:
            profile = measured_profile(
                [run for run in runs if run.mode != setup.peer],  # which generates one sample at a time
                num_warm_up=args.warm_up,
                model=f"{args.recipe or RECIPE} {' '.join(args.overrides)}".strip(),
                device=args.device,
            )
        except ValueError as error:
            print(f"digen bench: {error}", file=sys.stderr)
            return 2
        args.profile.write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")
        print(f"{args.profile}; try: digen simulate --profile {args.profile} --devices 32")
    return 0


def _setting(args: Namespace, setup: BenchSetup, *, num_repeats: int) -> dict[str, Any]:
    """Conditions of the comparison."""
    num_cores = len(os.sched_getaffinity(0))
    pools = f"{args.trainer} trainer + {args.generator} generator"
    if args.virtual is not None:
        devices = f"{pools}, virtual: {args.virtual}, simulated times x {args.time_scale:g}; on {num_cores} cores"
    elif _is_cpu():
        devices = f"{pools} on {num_cores} CPU cores; colocated: {setup.split.num_devices} ranks and replicas in turns"
    else:
        devices = f"{pools} devices; colocated: all {setup.split.num_devices} in turns"
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
        "virtual": args.virtual,
        "time_scale": args.time_scale,
        "peer": args.peer,
        "num_devices": setup.num_devices,
        "versions": {name: version(name) for name in ("verl-digen", "verl", "torch", "ray")},
    }
