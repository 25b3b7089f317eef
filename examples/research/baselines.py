# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/baselines.md: ways to run the same work on the same devices, all simulated; a few minutes on one core.

    python examples/research/baselines.py [PAGE]

It writes each table between `<!-- NAME -->` and `<!-- end of NAME -->` of the page and touches nothing else there. The
numbers are deterministic. `digen simulate` prints the runs of one profile, of other devices, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from as_verl_omni import NAME, PUBLISHED, VERL_OMNI, WINDOW, Reward, Way, run_verl_omni, simulated_step_s

from verl_digen.hardware.devices import Pool
from verl_digen.tools.simulate.cluster import (
    COLOCATED,
    COLOCATED_TSP,
    Split,
    SteadyRun,
    run_colocated,
    run_split,
    sample_s,
    together,
)
from verl_digen.tools.simulate.profile import Profile, load_profile, profile_names, windowed
from verl_digen.tools.simulate.splits import best_split

PAGE = Path(__file__).resolve().parents[2] / "docs" / "baselines.md"
DEVICE = "H800"
SIZES = (16, 32, 256)
MIXED = (Pool(20, "H800"), Pool(24, "A100"))
"""Training and generating pool of the comparison on two types of devices."""
LADDER_SIZE = 32
"""Devices of the tables of levers and of slow rewards."""
CALCULATED = [name for name in profile_names() if name != "sd3.5-medium"]
"""Profiles that verl-omni's way is compared on: its factors are over calculated seconds, not over measured ones."""
REWARD_TIMES = (0, 1, 3, 10)
"""Seconds of rewards in that table, as multiples of the time that all devices take to generate a batch."""
CALIBRATED = "qwen-image-20b"
"""Profile to which verl-omni's way is calibrated."""
ELSEWHERE = f"{NAME}, reward elsewhere"
"""verl-omni's way with the reward model on devices of its own."""

ALONE = f"{COLOCATED_TSP}, faster devices alone"
"""Colocated on the pool of the faster type, the other one unused."""

GAP_TSP, STRICT, EVERYTHING = "gap+tsp", "gap+tsp+tag", "gap+tsp+tag+tcss"
"""Separate pools; `STRICT` is on-policy with all that needs no stale sample, `EVERYTHING` may begin a batch early."""

NUM_STEPS = 40
"""Simulated steps of a run with separate pools, the default of `digen simulate`."""


@dataclass(frozen=True)
class Comparison:
    """Ways to do the same work on the same devices."""

    profile: Profile
    devices: str
    together: Pool
    """All devices, at the speed of the slowest type."""
    runs: Mapping[str, SteadyRun]
    """Name -> run: `NAME`, `ELSEWHERE`, `COLOCATED`, `COLOCATED_TSP`, `GAP_TSP`, `STRICT`, `EVERYTHING`; on two types
    of devices `ALONE`, too."""

    def speedup(self, name: str, over: str) -> float:
        """Factor by which the run `name` is faster than `over`."""
        return self.runs[over].step_s / self.runs[name].step_s


def with_reward(profile: Profile, reward_s: float) -> Profile:
    """The profile with a reward model on the devices that generate: each sample takes them that much longer.

    Args:
        reward_s: seconds of a device of the profile's type per sample.
    """
    numbers = replace(profile.numbers, decode_s=profile.numbers.decode_s + reward_s)
    return replace(profile, numbers=numbers)


def compare(profile: Profile, pools: Sequence[Pool], *, num_steps: int = NUM_STEPS) -> Comparison:
    """Simulate every way.

    Args:
        pools: all devices, of which each run takes its best split; or the training and the generating pool.
    """
    everything = together(profile, pools)
    runs = {
        NAME: run_verl_omni(profile, everything),
        ELSEWHERE: run_verl_omni(profile, everything, reward="elsewhere"),
        COLOCATED: run_colocated(profile, everything, has_tsp=False),
        COLOCATED_TSP: run_colocated(profile, everything, has_tsp=True),
    }
    if len(pools) == 2:
        faster = min(pools, key=lambda pool: pool.slowdown(profile.device))
        runs[ALONE] = run_colocated(profile, faster, has_tsp=True)
    for name in (GAP_TSP, STRICT, EVERYTHING):
        runs[name] = run_separate(profile, pools, name, num_steps=num_steps)
    return Comparison(profile, " + ".join(str(pool) for pool in pools), everything, runs)


def run_separate(profile: Profile, pools: Sequence[Pool], name: str, *, num_steps: int = NUM_STEPS) -> SteadyRun:
    """Simulate separate pools; `pools` as for `compare`.

    Args:
        name: the techniques, e.g. `STRICT`.
    """
    techniques = name.split("+")
    is_given = len(pools) == 2
    split = Split(*pools) if is_given else best_split(profile, pools[0], techniques, num_steps=num_steps)
    return run_split(profile, split, techniques, num_steps=num_steps)


def without_overheads(way: Way = VERL_OMNI) -> list[tuple[str, Way, Reward]]:
    """verl-omni's way, and what it takes more than a colocated run taken away, one after the other.

    Returns:
        (what is taken away, way, place of the reward model), each with all that stands before it.
    """
    batched = replace(way, generation_factor=1.0)
    one_update = replace(batched, num_updates=1, log_prob_samples=0)
    efficient = replace(one_update, replay_factor=1.0)
    return [
        ("as published", way, "in turns"),
        ("reward elsewhere", way, "elsewhere"),
        ("samples generated in batches", batched, "elsewhere"),
        ("one update, no log-prob pass", one_update, "elsewhere"),
        ("trainer as fast as the profile's", efficient, "elsewhere"),
        ("switching at the speed of the host's memory", replace(efficient, switch_factor=1.0), "elsewhere"),
    ]


@dataclass(frozen=True)
class Row:
    """One profile on some devices, without and with the reward model on them."""

    plain: Comparison
    rewarded: SteadyRun
    """`EVERYTHING` with verl-omni's reward model on the devices that generate."""

    @property
    def is_mixed(self) -> bool:
        return ALONE in self.plain.runs

    @property
    def over_verl_omni(self) -> dict[str, float]:
        """Place of the reward model -> factor by which everything on is faster than verl-omni's way."""
        return {
            "free": self.plain.speedup(EVERYTHING, NAME),
            "elsewhere": self.plain.speedup(EVERYTHING, ELSEWHERE),
            "both": self.plain.runs[NAME].step_s / self.rewarded.step_s,
        }


def row(profile: Profile, pools: Sequence[Pool], *, num_steps: int = NUM_STEPS) -> Row:
    """Simulate a row; `pools` as for `compare`."""
    rewarded = run_separate(with_reward(profile, VERL_OMNI.reward_s), pools, EVERYTHING, num_steps=num_steps)
    return Row(compare(profile, pools, num_steps=num_steps), rewarded)


def rows(window: int | None, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """All rows, with the profiles' own window or another one."""
    found = []
    for name in CALCULATED:
        profile = load_profile(name) if window is None else windowed(load_profile(name), window)
        for pools in (*([Pool(size, DEVICE)] for size in SIZES), MIXED):
            found.append(row(profile, pools))
            progress(f"{name}, {found[-1].plain.devices}, {trained(profile)}")
    return found


def trained(profile: Profile) -> str:
    """Trained steps, in words."""
    return f"{profile.numbers.num_trained_steps} of {profile.numbers.num_steps} steps trained"


def lines_of(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def lever_table(profiles: Sequence[Profile], size: int) -> list[str]:
    """Every step from verl-omni's way to everything on: seconds, and the factor to the line above."""
    pool = Pool(size, DEVICE)
    columns: list[Mapping[str, float]] = []
    for profile in profiles:
        column = {name: run_verl_omni(profile, pool, way, reward).step_s for name, way, reward in without_overheads()}
        column["tiles of samples x timesteps: colocated + TSP"] = run_colocated(profile, pool, has_tsp=True).step_s
        for name in (GAP_TSP, STRICT, EVERYTHING):
            column[f"two pools: {name}"] = run_separate(profile, [pool], name).step_s
        columns.append(column)
    body, before = [], [1.0] * len(columns)
    for number, name in enumerate(columns[0]):
        now = [column[name] for column in columns]
        cells = [
            f"{seconds:.1f} s" + (f", {last / seconds:.2f}x" if number else "")
            for seconds, last in zip(now, before, strict=True)
        ]
        body.append([name, *cells])
        before = now
    return lines_of([f"simulated, {pool}", *(f"`{profile.name}`" for profile in profiles)], body)


def slow_reward_table(profiles: Sequence[Profile], size: int) -> list[str]:
    """Speed-up of both kinds of separate pools over one pool, where rewards take as long as batches."""
    pool, body = Pool(size, DEVICE), []
    for times in REWARD_TIMES:
        cells = []
        for profile in profiles:
            numbers = profile.numbers
            rounds = -(-numbers.num_prompts * numbers.group_size // size)
            batch_s = rounds * sample_s(numbers, pool.slowdown(profile.device))
            slow = profile.changed(score_s=times * batch_s)
            one_s = run_colocated(slow, pool, has_tsp=True).step_s
            ratios = (one_s / run_separate(slow, [pool], name).step_s for name in (STRICT, EVERYTHING))
            cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
        body.append([f"{times}", *cells])
    return lines_of([f"simulated, {pool}", *(f"`{profile.name}`" for profile in profiles)], body)


def published_table(profile: Profile) -> list[str]:
    """Published steps and simulated ones."""
    body = []
    for step in PUBLISHED:
        simulated_s = simulated_step_s(profile, step)
        devices = f"{step.num_devices}" + (f" + {step.num_reward_devices}" if step.num_reward_devices else "")
        per_device = 512 / step.step_s / (step.num_devices + step.num_reward_devices)
        fitted = "fitted" if step.is_fitted else "not fitted"
        body.append(
            [
                *(step.name, devices, f"{step.step_s:g}", f"{simulated_s:.1f}"),
                *(f"{simulated_s / step.step_s - 1:+.1%}", fitted, f"{per_device:.3f}", f"`{step.source}`"),
            ]
        )
    head = ["Qwen-Image, window of 2", "devices", "published s", "simulated s", "error", "", "samples/s/device"]
    return lines_of([*head, "source"], body)


def summary_table(own: Sequence[Row], windowed_rows: Sequence[Row]) -> list[str]:
    """Speed-ups over the four profiles, from the smallest to the largest."""

    def spread(values: Iterable[float]) -> str:
        ordered = sorted(values)
        return f"{ordered[0]:.2f} to {ordered[-1]:.2f}"

    def body(found: Sequence[Row]) -> list[str]:
        of_size = {size: [row for row in found if row.plain.devices == f"{size}x{DEVICE}"] for size in SIZES}
        mixed = [row for row in found if row.is_mixed]
        return [
            spread(row.plain.speedup(STRICT, COLOCATED_TSP) for row in of_size[32]),
            spread(row.plain.speedup(EVERYTHING, COLOCATED_TSP) for row in of_size[32]),
            spread(row.plain.speedup(EVERYTHING, COLOCATED_TSP) for row in of_size[256]),
            spread(row.plain.speedup(STRICT, COLOCATED_TSP) for row in mixed),
            spread(row.plain.speedup(STRICT, ALONE) for row in mixed),
            *(spread(row.over_verl_omni[place] for row in of_size[32]) for place in ("free", "elsewhere", "both")),
        ]

    names = [
        "strict over colocated + TSP, 32 H800",
        "everything on over colocated + TSP, 32 H800",
        "everything on over colocated + TSP, 256 H800",
        "strict over colocated + TSP at the slower speed, 20 H800 + 24 A100",
        "strict over colocated + TSP on the 20 H800 alone",
        "everything on over verl-omni's way as published, 32 H800",
        "the same, its reward elsewhere",
        "the same, its reward model on both sides",
    ]
    head = ["simulated speed-up, the four profiles' range", "the profiles' windows", f"window of {WINDOW}"]
    return lines_of(head, [*zip(names, body(own), body(windowed_rows), strict=True)])


def tables(progress: Callable[[str], None] = lambda _: None) -> dict[str, list[str]]:
    """Name -> lines of every table of the page."""
    own, windowed_rows = rows(None, progress), rows(WINDOW, progress)
    profiles = [windowed(load_profile(name), WINDOW) for name in CALCULATED]
    calibrated = load_profile(CALIBRATED)
    return {
        "summary": summary_table(own, windowed_rows),
        "levers": lever_table(profiles, LADDER_SIZE),
        "rewards": slow_reward_table([load_profile(name) for name in profile_names()], LADDER_SIZE),
        "published": published_table(calibrated),
    }


def filled(text: str, made: Mapping[str, Sequence[str]]) -> str:
    """The page with its tables replaced.

    Raises:
        ValueError: a table has no place in the page.
    """
    for name, lines in made.items():
        place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end of {re.escape(name)} -->)", re.DOTALL)
        if place.search(text) is None:
            raise ValueError(f"the page must have <!-- {name} --> and <!-- end of {name} -->, got none; add both lines")
        block = "\n".join(lines)
        text = place.sub(lambda match, block=block: f"{match[1]}{block}\n{match[2]}", text)
    return text


def main(arguments: Sequence[str]) -> None:
    page = Path(arguments[0]) if arguments else PAGE
    made = tables(lambda done: print(done, file=sys.stderr, flush=True))
    page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
