# SPDX-License-Identifier: Apache-2.0
"""`make chaos ORDERS=10000 SEED=7`: many worlds on all cores, what went wrong, and the smallest world that shows it.

python -m tests.chaos --orders 10000 --seed 7     worlds 7000000 to 7009999
python -m tests.chaos --world 7000123             one of them, with where it waits if it is stuck
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.chaos.checks import KINDS
from tests.chaos.shrink import shrink
from tests.chaos.simulation import simulate
from tests.chaos.sweep import Tally, be_quiet, run_worlds
from tests.chaos.world import draw_world

WORLDS_PER_SEED = 1_000_000
WORLDS_PER_TASK = 50
MAX_SHOWN = 5
"""Failures that are shrunk and printed."""


def main() -> int:
    """Return 0 if nothing went wrong."""
    arguments = _parse()
    be_quiet()
    if arguments.world is not None:
        return _show_world(arguments.world, is_shrunk=False)
    first, tally, began_s = arguments.seed * WORLDS_PER_SEED, Tally(), time.monotonic()
    starts = range(first, first + arguments.orders, WORLDS_PER_TASK)
    context = multiprocessing.get_context("spawn")  # threads of imported libraries do not survive a fork
    with ProcessPoolExecutor(arguments.processes, mp_context=context, initializer=be_quiet) as pool:
        tasks = [
            pool.submit(run_worlds, start, min(WORLDS_PER_TASK, first + arguments.orders - start)) for start in starts
        ]
        for task in as_completed(tasks):
            tally.add(task.result())
            _show_progress(tally, arguments.orders, time.monotonic() - began_s)
    _show_tally(tally, time.monotonic() - began_s)
    for seed in sorted(tally.failed)[:MAX_SHOWN]:
        _show_world(seed, is_shrunk=True)
    return 1 if tally.failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--orders", type=int, default=10_000, help="worlds to simulate")
    parser.add_argument("--seed", type=int, default=7, help="which worlds")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="worlds at a time")
    parser.add_argument("--world", type=int, help="simulate this world alone")
    return parser.parse_args()


def _show_progress(tally: Tally, num_orders: int, elapsed_s: float) -> None:
    if sys.stderr.isatty() or tally.num_orders % max(WORLDS_PER_TASK, num_orders // 10) == 0:
        end = "\r" if sys.stderr.isatty() else "\n"
        line = f"{tally.num_orders} of {num_orders} orders, {elapsed_s:.0f} s, {len(tally.failed)} failed"
        print(line, end=end, file=sys.stderr, flush=True)


def _show_tally(tally: Tally, elapsed_s: float) -> None:
    print(f"{tally.num_orders} orders in {elapsed_s:.0f} s: {_counts(tally.ends)}")
    print(f"faults that struck: {_counts(tally.struck)}")
    print(", ".join(f"{tally.problems[kind]} {kind}" for kind in KINDS))


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items())) or "none"


def _show_world(seed: int, *, is_shrunk: bool) -> int:
    """Simulate a world again, or a small one that fails in the same way, and print all that is known of it."""
    verdict = simulate(draw_world(seed))
    if is_shrunk:
        verdict = shrink(verdict, simulate)
    print(
        f"\npython -m tests.chaos --world {seed}" + (" fails; a smaller world that fails alike:" if is_shrunk else "")
    )
    print(f"  {verdict.world!r}")
    print(f"  {verdict.end}")
    for problem in verdict.problems:
        print(f"  {problem.kind}: {problem.text}")
    for line in verdict.waiting:
        print(f"  {line}")
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main())
