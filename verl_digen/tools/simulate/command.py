# SPDX-License-Identifier: Apache-2.0
"""Simulate steps and idle time on a cluster, technique by technique, and find the best split of its devices.

Plays the planner that runs live, with the defaults of its settings, on the durations of a profile: of a shipped one,
calculated from FLOPs and bandwidths, or of your own JSON file with measured ones. A prediction is as good as its
profile, and knows no variance. Ratios are to the fastest run that overlaps nothing: colocated, with and without TSP, or
two pools with a barrier.

    digen simulate --profile qwen-image-20b --devices 32
    digen simulate --profile qwen-image-20b --devices 4 --window 2
    digen simulate --run outputs/mine --device H100            which split would be faster for this run?
    digen simulate --profile my.json --trainer 16xH800 --generator 24xH20 --techniques gap,tsp
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from math import inf
from pathlib import Path

from verl_digen.require import require
from verl_digen.schedulers.simulation import TECHNIQUES
from verl_digen.tools.simulate.cluster import Split, SteadyRun, baselines, best_baseline, ladder, run_split
from verl_digen.tools.simulate.profile import Profile, load_profile, profile_names, windowed
from verl_digen.tools.simulate.splits import WORTH_CHANGING, best_split, parse_pool

NAME = "simulate"

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
        "--techniques", default=",".join(TECHNIQUES), help="added one by one, some of %(default)s (default: all)"
    )
    parser.add_argument("--prompts", type=int, help="prompts of a step, in place of the profile's")
    parser.add_argument("--samples-per-prompt", type=int, help="in place of the profile's")
    parser.add_argument("--window", type=int, help="trained steps of a sample, in place of the profile's")
    parser.add_argument(
        "--reward-s", type=float, help="seconds from pixels to rewards, in place of the profile's; as in `digen plan`"
    )
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="simulated steps (default: %(default)s)")


def run(args: Namespace) -> int:
    profile = chosen_profile(args)
    for option, key, value, least in (
        ("--prompts", "num_prompts", args.prompts, 1),
        ("--samples-per-prompt", "group_size", args.samples_per_prompt, 1),
        ("--reward-s", "score_s", args.reward_s, 0),
    ):
        if value is not None:
            require(least <= value < inf, f"{option} must be >= {least}", value, "leave it out for the profile's own")
            profile = profile.changed(**{key: value})
    if args.window is not None:
        profile = windowed(profile, args.window)
    print(table(profile, simulate_all(profile, args)))
    return 0


def chosen_profile(args: Namespace) -> Profile:
    """The profile; of a run, with the run's devices in place of missing ones. ValueError if there is none."""
    rule = "--run needs --device, the type of the run's devices, and no profile does"
    require((args.run is None) == (args.device is None), rule, args.device, "give both or neither")
    if args.run is None:
        return load_profile(args.profile)
    from verl_digen.tools.simulate.measured_run import run_profile  # imports torch, which is slow

    profile, num_devices = run_profile(args.run, args.device)
    if (args.devices, args.trainer, args.generator) == (None, None, None):
        args.devices = num_devices
    return profile


def simulate_all(profile: Profile, args: Namespace) -> list[SteadyRun]:
    """Simulate the baselines, then one technique more at a time; each at its own best split unless one is given."""
    techniques = [name for name in args.techniques.split(",") if name]
    for name in techniques:
        require(name in TECHNIQUES, f"--techniques must be among {', '.join(TECHNIQUES)}", name, "drop it")
    num_options = sum(option is not None for option in (args.devices, args.trainer, args.generator))
    require(
        num_options == (2 if args.devices is None else 1),
        "the cluster must be --devices, or --trainer and --generator",
        f"{num_options} of these options",
        "give either the one or the other two",
    )
    given = None
    if args.devices is None:
        given = Split(
            parse_pool("--trainer", args.trainer, default_device=profile.device),
            parse_pool("--generator", args.generator, default_device=profile.device),
        )
        pools = [given.trainer, given.generator]
    else:
        pools = [parse_pool("--devices", str(args.devices), default_device=profile.device)]
        require(
            pools[0].num_devices <= MAX_SEARCHED,
            f"--devices must be <= {MAX_SEARCHED}: every split that is tried is simulated, device by device",
            pools[0].num_devices,
            "give the split, --trainer and --generator",
        )
    runs = baselines(profile, pools)
    for chosen in ladder(techniques):
        split = best_split(profile, pools[0], chosen, num_steps=args.steps) if given is None else given
        runs.append(run_split(profile, split, chosen, num_steps=args.steps))
    return runs


def table(profile: Profile, runs: Sequence[SteadyRun]) -> str:
    """The runs as a text table, each compared with the fastest baseline."""
    numbers, best = profile.numbers, best_baseline(runs)
    width = max(len(outcome.devices) for outcome in runs) + 1
    names = max(20, *(len(outcome.name) for outcome in runs))
    lines = [
        f"{profile.model}: {profile.setting}",
        f"{numbers.num_prompts} prompts x {numbers.group_size} samples per step, {numbers.num_trained_steps} of "
        f"{numbers.num_steps} denoise steps trained",
        f"simulated, not measured; best baseline: {best.name} ({best.devices}), {best.step_s:.1f} s/step",
        "",
        f"{'run':<{names}} {'devices':<{width}} {'s/step':>8} {'samples/s/device':>17} {'x best':>8} "
        f"{'trainer idle':>13} {'generator idle':>15} {'assisted':>9} {'stale':>6}",
    ]
    for outcome in runs:
        idle = [outcome.idle["all"]] * 2 if outcome.split is None else list(outcome.idle.values())
        lines.append(
            f"{outcome.name:<{names}} {outcome.devices:<{width}} {outcome.step_s:>8.1f} "
            f"{outcome.num_samples / outcome.step_s / outcome.num_devices:>17.4f} "
            f"{best.step_s / outcome.step_s:>7.2f}x {idle[0]:>13.1%} {idle[1]:>15.1%} {outcome.assisted:>9.1%} "
            f"{outcome.stale:>6.1%}"
        )
    lines += [
        "",
        _advice(runs, best),
        "",
        "x best: times as fast as the best baseline. stale: share of groups begun under weights one version old; 0 %",
        "is strict.",
    ]
    return "\n".join(lines)


def _advice(runs: Sequence[SteadyRun], best: SteadyRun) -> str:
    """The placement to choose, in a line: separate pools where they are faster by more than `WORTH_CHANGING`, and stale
    samples where they bring as much again."""
    chosen = best
    for is_stale in (False, True):
        fastest = min((run for run in runs if (run.stale > 0) == is_stale), key=lambda run: run.step_s, default=best)
        if chosen.step_s > WORTH_CHANGING * fastest.step_s:
            chosen = fastest
    if chosen.split is None:
        return (
            f"so: one pool, {chosen.devices} ({chosen.name}); two are not faster by more than {WORTH_CHANGING - 1:.0%}"
        )
    how = "digen.staleness.max_versions=1" if chosen.stale > 0 else "every sample on-policy"
    speedup = f"{best.step_s / chosen.step_s:.2f} times as fast as {best.name}"
    return f"so: two pools, {chosen.devices} ({chosen.name}, {how}), {speedup}"
