# SPDX-License-Identifier: Apache-2.0
"""Cheap steps outside a window: which of them the solver takes, from the settings and the window alone.

    T = 10, window (3, 4), solver_before 0.5, solver_after 0.4

    step         0   1   2 | 3   4 | 5   6   7   8   9
    taken to     1   3   - | 4   5 | 7   -   10  -   -        - : passed over, without a network evaluation

Of the n steps before the window, and of those after it, ceil(share n) are taken, each to the place in the model's own
schedule where the next one begins. So the window's sigmas are as in the whole schedule. A multistep solver reads the
sigmas between which it steps, so it keeps its order on the coarser schedule. With Euler's step passing over a step is
the same as to take it with the velocity of the step before. Steps that are taken lead from 0 to T without a gap, and
take every stochastic step to the step after it.

Source: MixGRPO-Flash (arXiv 2507.21802) takes 0.4 of the steps that follow the window, and all of those before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated

from verl_digen.algorithms.window import WindowConfig
from verl_digen.require import In, Section, require, require_value

DEFAULT_MAX_SKIPS = 2
ROUNDING = 1e-9
"""A number of steps may exceed a whole one by so much, and is that one: 0.4 x 5 is 2."""


@dataclass(frozen=True)
class Outside(Section, key="digen.sampling.outside"):
    """`digen.sampling.outside`: cheaper steps before and after a window in training. The window's own rows and
    log-probs stay exact."""

    cache: Annotated[float, In("[0, 1)"), "0.1 is usual; 0 evaluates the network at every step"] = 0.0
    """A step outside the window reuses the last velocity if it is predicted to have changed by less than this share of
    its norm. 0: off. For solver euler on `diffusers` replicas, without `digen.tag.policy`."""
    cache_max_skips: Annotated[int, In("[1, inf]"), "2 is usual; outside.cache=0 skips none"] = DEFAULT_MAX_SKIPS
    """Maximum steps in a row that reuse one velocity."""
    solver_before: Annotated[float, In("(0, 1]")] = 1.0
    """Share of the steps before the window that the solver takes, rounded up; it skips the others."""
    solver_after: Annotated[float, In("(0, 1]")] = 1.0
    """Share of the steps after the window, likewise. 0.4 in MixGRPO-Flash, with solver dpm2."""
    fp8: bool = False
    """Multiply in fp8 (e4m3) in the linear layers of the repeated blocks outside the window; a replica keeps one more
    byte per weight. For H100 and later, on `diffusers` replicas, without `digen.compile` and `digen.tag.policy`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache == 0:
            key, why = f"{self._key}.cache_max_skips", f"with {self._key}.cache=0, because it has no effect there"
            remedy = f"set {self._key}.cache=0.1, or leave it out"
            require_value(key, self.cache_max_skips, DEFAULT_MAX_SKIPS, why, remedy)

    @property
    def is_on(self) -> bool:
        """True if some step may cost less than all."""
        return self.fp8 or self.skips

    @property
    def skips(self) -> bool:
        """True if some step may pass without a network evaluation."""
        return self.cache > 0 or self.passes_over

    @property
    def passes_over(self) -> bool:
        """True if the solver takes fewer steps than the schedule has."""
        return self.solver_before < 1 or self.solver_after < 1


EXACT = Outside()
"""Every step evaluates the network and is taken to the next one."""


def step_ends(outside: Outside, sde_steps: Sequence[int], num_steps: int) -> tuple[int | None, ...]:
    """T entries: number of the step where the step ends, or None where it is passed over. `sde_steps` are the
    stochastic ones, ascending; without one nothing is outside of a window, and every step is taken.

    Example:
        step_ends(Outside(solver_after=0.4), (0, 1), 7)    # (1, 2, 4, None, 7, None, None)
    """
    ends: list[int | None] = [step + 1 for step in range(num_steps)]
    if not sde_steps:
        return tuple(ends)
    first, after = sde_steps[0], sde_steps[-1] + 1
    for start, end, share in ((0, first, outside.solver_before), (after, num_steps, outside.solver_after)):
        count = end - start
        num_taken = math.ceil(share * count - ROUNDING)
        if not 0 < num_taken < count:
            continue
        ends[start:end] = [None] * count
        for taken, following in pairwise(start + index * count // num_taken for index in range(num_taken + 1)):
            ends[taken] = following
    return tuple(ends)


def check_outside(outside: Outside, window: WindowConfig, num_steps: int) -> None:
    """ValueError unless some step that `outside` makes cheaper is outside some place of the window."""
    if not outside.is_on:
        return
    key = "digen.sampling.outside"
    set_key = next(field.name for field in fields(Outside) if getattr(outside, field.name) != field.default)
    require(
        window.kind == "consecutive",
        f"{key}.{set_key} must be left out with digen.window.kind={window.kind}, whose window is "
        "every step but the last, so that none is outside",
        getattr(outside, set_key),
        "set digen.window.kind=consecutive, as recipes flowgrpo_fast and mixgrpo do",
    )
    places = window_starts(window, num_steps)
    longest = {
        "cache": (max(max(start, num_steps - start - window.size) for start in places), "outside it"),
        "solver_before": (max(places), "before it"),
        "solver_after": (max(num_steps - start - window.size for start in places), "after it"),
    }
    for name, (count, where) in longest.items():
        require(
            getattr(outside, name) == getattr(EXACT, name) or count >= 2,
            f"{key}.{name} must be {getattr(EXACT, name):g} with a window of {window.size} of {num_steps} steps that "
            f"leaves no two steps in a row {where}",
            getattr(outside, name),
            "leave it out, lower digen.window.size, move digen.window.range, or sample more steps",
        )


def window_starts(window: WindowConfig, num_steps: int) -> list[int]:
    """First steps of all windows of kind consecutive."""
    lo, hi = window.range_for(num_steps)
    moves = range(num_steps - hi if window.shift_every is not None else 1)
    return [start for moved in moves for start in range(lo + moved, hi + moved - window.size + 1)]
