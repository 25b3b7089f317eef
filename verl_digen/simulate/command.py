# SPDX-License-Identifier: Apache-2.0
"""Simulate steps and idle time on a cluster, technique by technique, and find the best split of its devices.

Plays the planner that runs live, with the defaults of its settings, on the durations of a profile: of a shipped one,
calculated from FLOPs and bandwidths, or of your own JSON file with measured ones. A prediction is as good as its
profile, and knows no variance but what is asked for. Ratios are to the fastest run that overlaps nothing: colocated,
with and without TSP, or two pools with a barrier. verl-omni's way is shown beside them: colocated as its published
recipe runs it, calibrated to its published steps, with its reward model on the same devices (docs/baselines.md).

    digen simulate --profile qwen-image-20b --devices 32
    digen simulate --profile qwen-image-20b --devices 4 --window 2
    digen simulate --run outputs/mine --device H100            which split would be faster for this run?
    digen simulate --profile my.json --trainer 16xH800 --generator 24xH20 --techniques gap,tsp --picture runs.png

Jitter, slow devices, skew between ranks and failures are drawn from a seed, the same for all runs. Splits are those
that are best without them (docs/baselines.md):

    digen simulate --profile qwen-image-20b --devices 32 --jitter 0.1 --slow-devices 1/32:2 --failures 2e-5

With `--turns` a sample is an episode, and its environment takes a lognormal time after each turn; the first run is in
lock-step, where no episode begins a turn before all have ended the one before:

    digen simulate --profile qwen-image-20b --devices 32 --turns 4 --environment-latency 30:40 --slots-per-replica 16
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from verl_digen.devices import parse_pool
from verl_digen.require import require, suggestion
from verl_digen.schedulers.simulation import TECHNIQUES
from verl_digen.simulate.cluster import (
    Outcome,
    Split,
    baselines,
    best_baseline,
    ladder,
    run_split,
    together,
)
from verl_digen.simulate.episode_baselines import episode_baselines
from verl_digen.simulate.episode_runs import Episodes
from verl_digen.simulate.episodes import Latency
from verl_digen.simulate.options import require_absent
from verl_digen.simulate.profile import Profile, load_profile, profile_names
from verl_digen.simulate.splits import best_split
from verl_digen.simulate.variance import Variance
from verl_digen.simulate.variance_options import add_variance_arguments, in_words, variance_of
from verl_digen.simulate.varied import run_varied_split, varied_baselines
from verl_digen.simulate.verl_omni import run_verl_omni, windowed

NAME = "simulate"

PICTURE_SUFFIXES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp")
"""Formats that matplotlib draws."""

MAX_SEARCHED = 4096
"""Maximum number of devices for a search of the best split: half a minute per row of the table, on one core."""

DEFAULT_STEPS = 40
"""Default number of simulated steps, the first two included. With tcss, generation may take 20 steps to get as far
ahead as it is allowed."""


def add_arguments(parser: ArgumentParser) -> None:
    measured = parser.add_mutually_exclusive_group(required=True)
    measured.add_argument("--profile", help=f"{', '.join(profile_names())}, or a JSON file")
    measured.add_argument(
        "--run", type=Path, metavar="RUN_DIR", help="a run on separate pools, from its timeline; its devices by default"
    )
    parser.add_argument("--device", help="type of the run's devices, e.g. H100")
    parser.add_argument("--devices", help="all devices, e.g. 32 or 32xH100; the best split is searched")
    parser.add_argument(
        "--trainer", help="devices that train, e.g. 16 or 16xH800; with --generator, in place of --devices"
    )
    parser.add_argument("--generator", help="devices that generate")
    parser.add_argument(
        "--techniques",
        help=f"added one by one, of {','.join(TECHNIQUES)} (default: all; with --turns all but tag)",
    )
    parser.add_argument("--prompts", type=int, help="prompts of a step, in place of the profile's")
    parser.add_argument("--samples-per-prompt", type=int, help="in place of the profile's")
    parser.add_argument("--window", type=int, help="trained steps of a sample, in place of the profile's")
    parser.add_argument(
        "--whole-base",
        action="store_true",
        help="an adapter is trained and its base kept whole on every rank, so that no weights are gathered",
    )
    parser.add_argument(
        "--stale-fraction", type=float, default=1.0, help="of a batch, with tcss (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="simulated steps (default: %(default)s)")
    parser.add_argument("--turns", type=int, help="turns of an episode; without it samples are single pictures")
    parser.add_argument(
        "--environment-latency", metavar="MEAN[:STD]", help="seconds of a turn's environment, lognormal (default: 0)"
    )
    parser.add_argument(
        "--slots-per-replica",
        type=int,
        help="episodes that a device has at the same time on separate pools (default: 1)",
    )
    parser.add_argument("--extra-episodes", type=int, help="redundant episodes of a group, where pools take turns")
    parser.add_argument("--extra-prompts", type=int, help="redundant groups of a step, on separate pools")
    add_variance_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the runs and the profile's numbers")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the runs, e.g. runs.png")


def run(args: Namespace) -> int:
    try:
        check_writable("--json", args.json)
        check_writable("--picture", args.picture, PICTURE_SUFFIXES)
        profile = resized(chosen_profile(args), args.prompts, args.samples_per_prompt)
        if args.window is not None:
            profile = windowed(profile, args.window)
        if args.whole_base:
            profile = without_gathers(profile)
        episodes, variance = episodes_of(args), variance_of(args)
        runs = simulate_all(profile, args, episodes, variance)
    except ValueError as error:
        print(f"digen simulate: {error}", file=sys.stderr)
        return 2
    print(table(profile, runs, episodes, variance))
    if args.json is not None:
        args.json.write_text(json.dumps(to_json(profile, runs, episodes, variance), indent=2) + "\n", encoding="utf-8")
    if args.picture is not None:
        from verl_digen.simulate.picture import draw  # imports matplotlib, which is slow

        draw(profile, runs, args.picture)
    return 0


def chosen_profile(args: Namespace) -> Profile:
    """The profile; of a run, with the run's devices in place of missing ones.

    Raises:
        ValueError: there is no such profile or run.
    """
    require(
        (args.run is None) == (args.device is None),
        "--run needs --device, the type of the run's devices, and no profile does",
        args.device,
        "give both or neither",
    )
    if args.run is None:
        return load_profile(args.profile)
    from verl_digen.simulate.measured_run import run_profile  # imports torch, which is slow

    profile, num_devices = run_profile(args.run, args.device)
    if (args.devices, args.trainer, args.generator) == (None, None, None):
        args.devices = num_devices
    return profile


def check_writable(option: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Raise ValueError unless the folder of `path` exists, and `path` ends in one of `suffixes`, if any.

    Call it before the work begins, so that no result is lost.
    """
    if path is None:
        return
    require(
        not suffixes or path.suffix.lower() in suffixes,
        f"{option} must end in one of {', '.join(suffixes)}",
        str(path),
        f"{suggestion(path.suffix, suffixes)}e.g. runs.png",
    )
    folder = path.parent
    require(
        folder.is_dir()
        and os.access(folder, os.W_OK | os.X_OK)
        and not path.is_dir()
        and (os.path.exists(path) or not path.is_symlink()),
        f"{option} must be a file in a folder that is there and can be written",
        str(path),
        "make the folder, or name another",
    )


def resized(profile: Profile, num_prompts: int | None, group_size: int | None) -> Profile:
    """The profile with another batch size."""
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


def without_gathers(profile: Profile) -> Profile:
    """The profile of an adapter whose base is whole on every rank; the adapter is gathered in no time."""
    sources = {**profile.sources, "gather_s": "chosen: --whole-base"}
    return replace(profile, numbers=replace(profile.numbers, gather_s=0.0), sources=sources)


def episodes_of(args: Namespace) -> Episodes | None:
    """Read the options of episodes; None without `--turns`.

    Raises:
        ValueError: one of the others without `--turns`, or a value that is out of range.
    """
    given = {
        name: value
        for name in ("environment_latency", "slots_per_replica", "extra_episodes", "extra_prompts")
        if (value := getattr(args, name)) is not None
    }
    if args.turns is None:
        for name in given:
            require_absent(args, name, "--turns", "give the turns, too")
        return None
    latency = parse_latency(given.pop("environment_latency", "0"))
    return Episodes(args.turns, latency, **given)


def parse_latency(text: str) -> Latency:
    """Read `MEAN` or `MEAN:STD`, in seconds."""
    mean, _, std = text.partition(":")
    try:
        mean_s, std_s = float(mean), float(std or 0)
    except ValueError as error:
        raise ValueError(
            f"--environment-latency must be MEAN or MEAN:STD in seconds, got {text!r}; e.g. 2 or 2:1"
        ) from error
    return Latency(mean_s, std_s)


def simulate_all(
    profile: Profile, args: Namespace, episodes: Episodes | None = None, variance: Variance | None = None
) -> list[Outcome]:
    """Simulate the baselines, then one technique more at a time; each at its own best split unless one is given."""
    wanted = args.techniques
    if wanted is None:
        wanted = ",".join(name for name in TECHNIQUES if episodes is None or name != "tag")
    techniques = [name for name in wanted.split(",") if name]
    for name in techniques:
        require(name in TECHNIQUES, f"--techniques must be among {', '.join(TECHNIQUES)}", name, "drop it")
    if episodes is not None:
        episodes.check(techniques)
    options = {"num_steps": args.steps, "stale_fraction": args.stale_fraction, "episodes": episodes}
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
    if given is None:
        pool = parse_pool("--devices", str(args.devices), default_device=profile.device)
        require(
            pool.num_devices <= MAX_SEARCHED,
            f"--devices must be <= {MAX_SEARCHED}: every split that is tried is simulated, device by device",
            pool.num_devices,
            "give the split, --trainer and --generator",
        )
        pools = [pool]
    else:
        pools = [given.trainer, given.generator]
    if variance is not None:
        runs = varied_baselines(profile, pools, variance)
    elif episodes is None:
        runs = baselines(profile, pools)
        runs.insert(0, run_verl_omni(profile, together(profile, pools), devices=runs[0].devices))
    else:
        runs = episode_baselines(profile, pools, episodes)
    for chosen in ladder(techniques):
        split = best_split(profile, pools[0], chosen, **options) if given is None else given
        keeps_events = args.picture is not None
        if variance is None:
            runs.append(run_split(profile, split, chosen, keeps_events=keeps_events, **options))
        else:
            steps = {"num_steps": args.steps, "stale_fraction": args.stale_fraction}
            runs.append(run_varied_split(profile, split, chosen, variance, keeps_events=keeps_events, **steps))
    return runs


def table(
    profile: Profile,
    runs: Sequence[Outcome],
    episodes: Episodes | None = None,
    variance: Variance | None = None,
) -> str:
    """The runs as a text table, each compared with the fastest baseline."""
    numbers, best = profile.numbers, best_baseline(runs)
    width = max(len(outcome.devices) for outcome in runs) + 1
    names = max(20, *(len(outcome.name) for outcome in runs))
    lines = [
        f"{profile.model}: {profile.setting}",
        f"{numbers.num_prompts} prompts x {numbers.group_size} samples per step, {numbers.num_trained_steps} of "
        f"{numbers.num_steps} denoise steps trained{_of_episodes(episodes)}",
        *([] if variance is None else [in_words(variance, runs[0].num_devices)]),
        f"simulated, not measured; best baseline: {best.name} ({best.devices}), {best.step_s:.1f} s/step",
        "",
        f"{'run':<{names}} {'devices':<{width}} {'s/step':>8} {'samples/s/device':>17} {'x best':>8} "
        f"{'trainer idle':>13} {'generator idle':>15} {'assisted':>9} {'stale':>6} {'at least':>9}",
    ]
    for outcome in runs:
        idle = [outcome.idle["all"]] * 2 if outcome.split is None else list(outcome.idle.values())
        lines.append(
            f"{outcome.name:<{names}} {outcome.devices:<{width}} {outcome.step_s:>8.1f} "
            f"{outcome.samples_per_device_s:>17.4f} {best.step_s / outcome.step_s:>7.2f}x "
            f"{idle[0]:>13.1%} {idle[1]:>15.1%} {outcome.assisted:>9.1%} "
            f"{outcome.stale:>6.1%} {_bound(outcome):>9}"
        )
    lines += [
        "",
        "x best: times as fast as the best baseline. stale: share of groups begun under weights one version old; 0 %",
        "is strict. at least: calculated, a step in which nobody waits.",
    ]
    if variance is not None and variance.failures is not None:
        lines += [_stops(outcome) for outcome in runs]
    return "\n".join(lines)


def _of_episodes(episodes: Episodes | None) -> str:
    if episodes is None:
        return ""
    latency = episodes.latency
    return (
        f"\na sample is an episode of {episodes.num_turns} turns; environment {latency.mean_s:g} s a turn, standard "
        f"deviation {latency.std_s:g} s; on separate pools {episodes.slots_per_replica} at the same time on a device"
    )


def _stops(outcome: Outcome) -> str:
    return (
        f"{outcome.name}, {outcome.devices}: {outcome.stopped:.2%} of the time for stops, expected; "
        f"{outcome.num_deaths} replicas died in the simulated steps"
    )


def _bound(outcome: Outcome) -> str:
    return "-" if outcome.bound_s is None else f"{outcome.bound_s:.1f}"


def to_json(
    profile: Profile,
    runs: Sequence[Outcome],
    episodes: Episodes | None = None,
    variance: Variance | None = None,
) -> dict[str, Any]:
    """The runs, and every input number with its source."""
    best = best_baseline(runs)
    return {
        "profile": profile.name,
        "model": profile.model,
        "setting": profile.setting,
        "device": profile.device,
        "numbers": {
            key: {"value": value, "source": profile.sources[key]} for key, value in vars(profile.numbers).items()
        },
        "episodes": None if episodes is None else asdict(episodes),
        "variance": None if variance is None else asdict(variance),
        "best_baseline": {"name": best.name, "devices": best.devices, "step_s": best.step_s},
        "runs": [
            {
                "name": outcome.name,
                "devices": outcome.devices,
                "trainer": None if outcome.split is None else str(outcome.split.trainer),
                "generator": None if outcome.split is None else str(outcome.split.generator),
                "num_devices": outcome.num_devices,
                "num_samples": outcome.num_samples,
                "step_s": outcome.step_s,
                "speedup": best.step_s / outcome.step_s,
                "samples_per_device_s": outcome.samples_per_device_s,
                "idle": outcome.idle,
                "assisted": outcome.assisted,
                "stale": outcome.stale,
                "bound_s": outcome.bound_s,
                "num_deaths": outcome.num_deaths,
                "stopped": outcome.stopped,
            }
            for outcome in runs
        ],
    }
