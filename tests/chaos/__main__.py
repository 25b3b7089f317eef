# SPDX-License-Identifier: Apache-2.0
"""`make chaos ORDERS=10000 SEED=7`: many worlds on all cores, what went wrong, and the smallest world that shows it.

python -m tests.chaos --orders 10000 --seed 7     worlds 7000000 to 7009999
python -m tests.chaos --world 7000123             one of them, with where it waits if it is stuck
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from tests.chaos.checks import KINDS
from tests.chaos.simulation import Verdict, be_quiet, run_world, shrink

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
    first, began_s, verdicts = arguments.seed * WORLDS_PER_SEED, time.monotonic(), list[Verdict]()
    context = multiprocessing.get_context("spawn")  # threads of imported libraries do not survive a fork
    with ProcessPoolExecutor(arguments.processes, mp_context=context, initializer=be_quiet) as pool:
        seeds = range(first, first + arguments.orders)
        for verdict in pool.map(run_world, seeds, chunksize=WORLDS_PER_TASK):
            verdicts.append(verdict)
            if len(verdicts) % max(1, arguments.orders // 10) == 0:
                print(f"{len(verdicts)} orders, {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    failed = [verdict.world.seed for verdict in verdicts if verdict.problems]
    print(f"{len(verdicts)} orders: {_counts(verdict.end.split(':')[0] for verdict in verdicts)}")
    print(f"faults that struck: {_counts(fault.kind.value for verdict in verdicts for fault in verdict.struck)}")
    problems = Counter(problem.kind for verdict in verdicts for problem in verdict.problems)
    print(", ".join(f"{problems[kind]} {kind}" for kind in KINDS))
    for seed in failed[:MAX_SHOWN]:
        _show_world(seed, is_shrunk=True)
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--orders", type=int, default=10_000, help="worlds to simulate")
    parser.add_argument("--seed", type=int, default=7, help="which worlds")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="worlds at a time")
    parser.add_argument("--world", type=int, help="simulate this world alone")
    return parser.parse_args()


def _counts(names: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(names).items())) or "none"


def _show_world(seed: int, *, is_shrunk: bool) -> int:
    """Simulate a world again, or a small one that fails in the same way, and print all that is known of it."""
    verdict = run_world(seed)
    if is_shrunk:
        verdict = shrink(verdict)
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
