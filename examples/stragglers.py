# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/baselines.md with variance; simulated, some minutes on one core.

    python examples/stragglers.py [PAGE]

It writes them between `<!-- NAME -->` and `<!-- end of NAME -->` of the page and touches nothing else. The numbers
are deterministic: medians over `SEEDS`. `digen simulate --jitter 0.1` and so on print the runs of one case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from baselines import DEVICE, PAGE, filled, lines_of

from verl_digen.devices import Pool
from verl_digen.simulate.cluster import COLOCATED_TSP, SHARED_QUEUE, Split
from verl_digen.simulate.comparison import EVERYTHING, NUM_STEPS, STRICT
from verl_digen.simulate.phases import Phases
from verl_digen.simulate.profile import Profile, load_profile, profile_names
from verl_digen.simulate.splits import best_split
from verl_digen.simulate.variance import Failures, SlowDevices, Variance
from verl_digen.simulate.varied import run_varied_colocated, run_varied_split

SIZES = (32, 256, 1024)
SEEDS = range(5)
RATE_PER_H = 419 / (54 * 24 * 16384)
"""Failures per device and hour. Derived: 419 unexpected interruptions of 16,384 H100 in 54 days (published: The Llama 3
Herd of Models, section 3.3.4)."""
SLOW = SlowDevices(1, 32)
EXACT, LEFT_OUT = "exact", "1 in 32 left out"
CASES: Mapping[str, Variance] = {
    EXACT: Variance(),
    "jitter 10 %": Variance(jitter=0.1),
    "ranks skewed by 5 %": Variance(rank_skew=0.05),
    "1 in 32 at half speed": Variance(slow=SLOW),
    "the same, it generates": Variance(slow=replace(SLOW, place="generator")),
    LEFT_OUT: Variance(),
    "failures": Variance(failures=Failures(RATE_PER_H)),
}
"""Name -> variance; of `LEFT_OUT` the slow devices are in no run."""
RUNS = (COLOCATED_TSP, SHARED_QUEUE, STRICT, EVERYTHING)


@dataclass(frozen=True)
class Row:
    """One profile on some devices with one kind of variance."""

    profile: str
    size: int
    case: str
    step_s: Mapping[str, float]
    """Run -> seconds of a step, median over the seeds."""

    def speedup(self, name: str, over: str) -> float:
        """Factor by which one run is faster than another."""
        return self.step_s[over] / self.step_s[name]


def splits_of(profile: Profile, size: int) -> dict[str, Split]:
    """Best splits of so many devices without variance."""
    pool = Pool(size, DEVICE)
    return {name: best_split(profile, pool, name.split("+"), num_steps=NUM_STEPS) for name in (STRICT, EVERYTHING)}


def row(
    profile: Profile, size: int, case: str, splits: Mapping[str, Split] | None = None, seeds: Sequence[int] = SEEDS
) -> Row:
    """Simulate a row.

    Args:
        splits: `splits_of` the profile and size.
    """
    num_devices = size - SLOW.number(size) if case == LEFT_OUT else size
    if splits is None or case == LEFT_OUT:
        splits = splits_of(profile, num_devices)
    found: dict[str, list[float]] = {name: [] for name in RUNS}
    for seed in seeds:
        variance = replace(CASES[case], seed=seed)
        phases = Phases(variance, profile.numbers, num_devices)
        for name, has_queue in ((COLOCATED_TSP, False), (SHARED_QUEUE, True)):
            run = run_varied_colocated(profile, Pool(num_devices, DEVICE), phases, has_tsp=True, has_queue=has_queue)
            found[name].append(run.step_s)
        for name, split in splits.items():
            found[name].append(run_varied_split(profile, split, name.split("+"), variance, num_steps=NUM_STEPS).step_s)
        if variance.is_constant and variance.slow is None and variance.failures is None:
            break  # another seed is the same
    return Row(profile.name, size, case, {name: median(seconds) for name, seconds in found.items()})


def rows(progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """All rows."""
    found = []
    for name in profile_names():
        profile = load_profile(name)
        for size in SIZES:
            splits = splits_of(profile, size)
            found += [row(profile, size, case, splits) for case in CASES]
            progress(f"{name}, {size} devices")
    return found


def cells(row: Row) -> list[str]:
    """Cells of a row of `row_table`."""
    return [
        *(f"`{row.profile}`", f"{row.size}", row.case),
        *(f"{row.step_s[name]:.1f}" for name in RUNS),
        *(f"{row.speedup(name, COLOCATED_TSP):.2f}" for name in (STRICT, EVERYTHING)),
        *(f"{row.speedup(name, SHARED_QUEUE):.2f}" for name in (STRICT, EVERYTHING)),
    ]


def row_table(found: Sequence[Row]) -> list[str]:
    """Seconds of a step of every run, and factors."""
    head = [
        "simulated s/step",
        DEVICE,
        "variance",
        "colocated + TSP",
        "the same, shared queue",
        "strict",
        "everything on",
    ]
    head += ["strict over colocated + TSP", "everything over it", "strict over the shared queue", "everything over it"]
    return lines_of(head, [cells(row) for row in found])


def range_table(found: Sequence[Row]) -> list[str]:
    """Ranges over the profiles: what each kind of variance costs a run, and factors between runs."""
    exact = {(row.profile, row.size): row for row in found if row.case == EXACT}
    body = []
    for size in SIZES:
        for case in CASES:
            of_case = [row for row in found if (row.size, row.case) == (size, case)]
            costs = [
                [row.step_s[name] / exact[row.profile, size].step_s[name] for row in of_case]
                for name in (COLOCATED_TSP, STRICT, EVERYTHING)
            ]
            over = [
                [row.speedup(name, baseline) for row in of_case]
                for baseline in (COLOCATED_TSP, SHARED_QUEUE)
                for name in (STRICT, EVERYTHING)
            ]
            body.append(
                [f"{size}", case, *(_range(values, 3) for values in costs), *(_range(values, 2) for values in over)]
            )
    head = ["H800", "variance", "step over exact: colocated + TSP", "strict", "everything on"]
    head += ["times as fast: strict over colocated + TSP", "everything over it"]
    head += ["strict over the shared queue", "everything over it"]
    return lines_of(head, body)


def _range(values: Sequence[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def main(arguments: Sequence[str]) -> None:
    page = Path(arguments[0]) if arguments else PAGE
    found = rows(lambda done: print(done, file=sys.stderr, flush=True))
    made = {
        "variance, ranges": range_table(found),
        "variance": row_table(found),
    }
    page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
