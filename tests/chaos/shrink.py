# SPDX-License-Identifier: Apache-2.0
"""Shrink a failing world to a small one that fails in the same way: one fault or one number less at a time."""

from __future__ import annotations

from collections.abc import Callable

from tests.chaos.simulation import Verdict
from tests.chaos.world import World, smaller

MAX_RUNS = 400
"""Maximum number of runs for shrinking."""


def shrink(failed: Verdict, run: Callable[[World], Verdict]) -> Verdict:
    """Find the smallest world with a problem of a kind that `failed` has; returns its verdict."""
    kinds = {problem.kind for problem in failed.problems}
    num_runs = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for world in smaller(failed.world):
            if num_runs == MAX_RUNS:
                return failed
            num_runs += 1
            verdict = run(world)
            if kinds & {problem.kind for problem in verdict.problems}:
                failed, is_smaller = verdict, True
                break
    return failed
