# SPDX-License-Identifier: Apache-2.0
"""Search of the best split of equal devices into trainer and generator, by simulation. Pure.

Invariant (tests/simulate/test_splits.py): up to `GRID_POINTS` splits, the best of them all is found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from verl_digen.devices import Pool
from verl_digen.require import require
from verl_digen.tools.simulate.cluster import Split, run_split
from verl_digen.tools.simulate.profile import Profile

SEARCH_STEPS = 10
"""Maximum number of simulated steps per split tried; the best one is then simulated for all steps."""

GRID_POINTS = 9
"""Number of splits tried before the search narrows down on the best one's neighbours."""


def best_split(
    profile: Profile,
    pool: Pool,
    techniques: Collection[str],
    *,
    num_steps: int,
    stale_fraction: float = 1.0,
) -> Split:
    """The split of `pool` with the shortest step: a grid over all splits, refined around the best.

    Exact for up to `GRID_POINTS` splits; else if the step time has a single minimum. Ties: the smaller trainer.
    """
    smallest, largest = profile.numbers.min_trainer_devices, pool.num_devices - 1
    require(
        largest >= smallest,
        f"--devices must be > {smallest}: the training state of {profile.model} takes that many, and one generates",
        pool.num_devices,
        "give more devices",
    )

    def split(num_trainer: int) -> Split:
        return Split(replace(pool, num_devices=num_trainer), replace(pool, num_devices=pool.num_devices - num_trainer))

    known: dict[int, float] = {}

    def step_s(num_trainer: int) -> float:
        if num_trainer not in known:
            steps = min(num_steps, SEARCH_STEPS)
            outcome = run_split(profile, split(num_trainer), techniques, num_steps=steps, stale_fraction=stale_fraction)
            known[num_trainer] = outcome.step_s
        return known[num_trainer]

    return split(lowest(smallest, largest, step_s))


def lowest(smallest: int, largest: int, value: Callable[[int], float]) -> int:
    """Argument in [smallest, largest] with the least value, by a grid that narrows around the best."""
    while True:
        stride = max(1, -(-(largest - smallest) // (GRID_POINTS - 1)))
        tried = [*range(smallest, largest, stride), largest]
        best = min(tried, key=lambda argument: (value(argument), argument))
        if stride == 1:
            return best
        smallest, largest = max(smallest, best - stride), min(largest, best + stride)
