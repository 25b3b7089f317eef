# SPDX-License-Identifier: Apache-2.0
"""Simulation of many worlds, and counts of their outcomes."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.simulation import simulate
from tests.chaos.world import draw_world


@dataclass
class Tally:
    """Outcomes of many worlds, counted."""

    num_orders: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    """Kind of fault -> number of times that one struck."""
    problems: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)
    """Seeds of worlds with a problem."""

    def add(self, other: Tally) -> None:
        self.num_orders += other.num_orders
        self.ends += other.ends
        self.struck += other.struck
        self.problems += other.problems
        self.failed += other.failed


def run_worlds(first: int, count: int) -> Tally:
    """Simulate the worlds of `count` seeds."""
    tally = Tally(count)
    for seed in range(first, first + count):
        verdict = simulate(draw_world(seed))
        tally.ends[verdict.end.split(":")[0]] += 1
        tally.struck.update(fault.kind.value for fault in verdict.struck)
        tally.problems.update(problem.kind for problem in verdict.problems)
        if verdict.problems:
            tally.failed.append(seed)
    return tally


def be_quiet() -> None:
    """Silence the project's messages about intended faults, and libraries' messages about other libraries."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
