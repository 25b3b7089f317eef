# SPDX-License-Identifier: Apache-2.0
"""Predict steps and idle time on a cluster, technique by technique, and find the best split of its devices.

Plays the planner that runs live on the durations of a profile: of a shipped one, derived from FLOPs and bandwidths, or
of your own JSON file with measured ones. A prediction is as good as its profile, and knows no variance.

    digen simulate --profile qwen-image-20b --devices 32
    digen simulate --profile my.json --trainer 16xH800 --generator 24xH20 --techniques gap,tsp --picture runs.png
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_digen.schedulers.require import require
from verl_digen.schedulers.simulation import TECHNIQUES
from verl_digen.simulate.cluster import Outcome, Split, best_split, ladder, run_colocated, run_split
from verl_digen.simulate.devices import parse_pool
from verl_digen.simulate.profile import Profile, load_profile, profile_names

NAME = "simulate"

DEFAULT_STEPS = 10
"""Of which the first two are left out."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--profile", required=True, help=f"{', '.join(profile_names())}, or a JSON file")
    parser.add_argument("--devices", help="all devices, e.g. 32 or 32xH100; the best split is searched")
    parser.add_argument(
        "--trainer", help="devices that train, e.g. 16 or 16xH800; with --generator, in place of --devices"
    )
    parser.add_argument("--generator", help="devices that generate")
    parser.add_argument(
        "--techniques", default=",".join(TECHNIQUES), help="added one by one, of %(default)s (default: all)"
    )
    parser.add_argument("--prompts", type=int, help="prompts of a step, in place of the profile's")
    parser.add_argument("--samples-per-prompt", type=int, help="in place of the profile's")
    parser.add_argument(
        "--stale-fraction", type=float, default=1.0, help="of a batch, with tcss (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="simulated steps (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the runs and the profile's numbers")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the runs, e.g. runs.png")


def run(args: Namespace) -> int:
    try:
        profile = resized(load_profile(args.profile), args.prompts, args.samples_per_prompt)
        runs = simulate_all(profile, args)
    except ValueError as error:
        print(f"digen simulate: {error}", file=sys.stderr)
        return 2
    print(table(profile, runs))
    if args.json is not None:
        args.json.write_text(json.dumps(to_json(profile, runs), indent=2) + "\n", encoding="utf-8")
    if args.picture is not None:
        from verl_digen.simulate.picture import draw  # imports matplotlib, which is slow

        draw(profile, runs, args.picture)
    return 0


def resized(profile: Profile, num_prompts: int | None, group_size: int | None) -> Profile:
    """The profile with another batch."""
    numbers, sources = profile.numbers, dict(profile.sources)
    for option, key, value in (
        ("--prompts", "num_prompts", num_prompts),
        ("--samples-per-prompt", "group_size", group_size),
    ):
        if value is not None:
            require(value >= 1, f"{option} must be >= 1", value, "leave it out for the profile's own")
            numbers = replace(numbers, **{key: value})
            sources[key] = f"chosen: {option}"
    return replace(profile, numbers=numbers, sources=sources)


def simulate_all(profile: Profile, args: Namespace) -> list[Outcome]:
    """The baselines, then one technique more at a time; each at its own best split unless one is given."""
    techniques = [name for name in args.techniques.split(",") if name]
    for name in techniques:
        require(name in TECHNIQUES, f"--techniques must be among {', '.join(TECHNIQUES)}", name, "drop it")
    options = {"num_steps": args.steps, "stale_fraction": args.stale_fraction}
    given: Split | None = None
    if args.trainer is not None and args.generator is not None:
        given = Split(
            parse_pool("--trainer", args.trainer, default_device=profile.device),
            parse_pool("--generator", args.generator, default_device=profile.device),
        )
    num_options = sum(option is not None for option in (args.devices, args.trainer, args.generator))
    require(
        num_options == (2 if args.devices is None else 1) and (args.devices is None) == (given is not None),
        "the cluster must be --devices, or --trainer and --generator",
        f"{num_options} of these options",
        "give either the one or the other two",
    )
    runs: list[Outcome] = []
    if given is None:
        pool = parse_pool("--devices", str(args.devices), default_device=profile.device)
    else:
        pool = replace(given.trainer, num_devices=given.num_devices)
    if (
        given is None or given.trainer.device == given.generator.device
    ):  # a colocated run on two types of devices goes as the slower one
        runs.append(run_colocated(profile, pool, has_tsp=False))
        if "tsp" in techniques:
            runs.append(run_colocated(profile, pool, has_tsp=True))
    for chosen in ladder(techniques):
        split = given if given is not None else best_split(profile, pool, chosen, **options)
        runs.append(run_split(profile, split, chosen, keeps_events=args.picture is not None, **options))
    return runs


def table(profile: Profile, runs: Sequence[Outcome]) -> str:
    """The runs as text."""
    numbers = profile.numbers
    lines = [
        f"{profile.model}: {profile.setting}",
        f"{numbers.num_prompts} prompts x {numbers.group_size} samples per step, {numbers.num_trained_steps} of "
        f"{numbers.num_steps} denoise steps trained; simulated, not measured",
        "",
        f"{'run':<20} {'trainer + generator':<20} {'s/step':>8} {'samples/s/device':>17} {'speedup':>8} "
        f"{'trainer idle':>13} {'generator idle':>15} {'assisted':>9} {'stale':>6} {'at least':>9}",
    ]
    for outcome in runs:
        idle = [outcome.idle["all"]] * 2 if outcome.split is None else list(outcome.idle.values())
        split = f"{outcome.num_devices} together" if outcome.split is None else str(outcome.split)
        lines.append(
            f"{outcome.name:<20} {split:<20} {outcome.step_s:>8.1f} {outcome.samples_per_device_s:>17.4f} "
            f"{runs[0].step_s / outcome.step_s:>7.2f}x {idle[0]:>13.1%} {idle[1]:>15.1%} {outcome.assisted:>9.1%} "
            f"{outcome.stale:>6.1%} {_bound(outcome):>9}"
        )
    return "\n".join(lines)


def _bound(outcome: Outcome) -> str:
    return "-" if outcome.bound_s is None else f"{outcome.bound_s:.1f}"


def to_json(profile: Profile, runs: Sequence[Outcome]) -> dict[str, Any]:
    """The runs, and every number they rest on with its source."""
    return {
        "profile": profile.name,
        "model": profile.model,
        "setting": profile.setting,
        "device": profile.device,
        "numbers": {
            key: {"value": value, "source": profile.sources[key]} for key, value in vars(profile.numbers).items()
        },
        "runs": [
            {
                "name": outcome.name,
                "trainer": None if outcome.split is None else str(outcome.split.trainer),
                "generator": None if outcome.split is None else str(outcome.split.generator),
                "num_devices": outcome.num_devices,
                "num_samples": outcome.num_samples,
                "step_s": outcome.step_s,
                "samples_per_device_s": outcome.samples_per_device_s,
                "idle": outcome.idle,
                "assisted": outcome.assisted,
                "stale": outcome.stale,
                "bound_s": outcome.bound_s,
            }
            for outcome in runs
        ],
    }
