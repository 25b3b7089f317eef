# SPDX-License-Identifier: Apache-2.0
"""Steps that the solver passes over, and the rules for `digen.sampling.outside`."""

import itertools
import math
from dataclasses import replace

import pytest

from verl_digen.algorithms.outside import EXACT, Outside, step_ends, window_starts
from verl_digen.algorithms.window import WindowConfig, draw_window
from verl_digen.config import DigenConfig, SamplingConfig
from verl_digen.schedulers.rules import TagConfig

FAST = WindowConfig(kind="consecutive", size=3)


def path(ends: tuple[int | None, ...]) -> list[int]:
    """Steps that are taken, in order, and the end."""
    at, found = 0, []
    while at < len(ends):
        found.append(at)
        end = ends[at]
        assert end is not None and end > at
        at = end
    return [*found, at]


@pytest.mark.parametrize(("before", "after"), [(1.0, 1.0), (0.5, 0.4), (0.01, 1.0), (1.0, 0.01), (0.9, 0.7)])
def test_steps_taken_lead_through_the_schedule_and_take_every_stochastic_one(before, after):
    for num_steps, size in itertools.product(range(2, 26), range(1, 5)):
        for first in range(num_steps - size):
            sde = tuple(range(first, first + size))
            ends = step_ends(Outside(solver_before=before, solver_after=after), sde, num_steps)
            taken = path(ends)
            assert taken[0] == 0 and taken[-1] == num_steps
            assert [step for step, end in enumerate(ends) if end is not None] == taken[:-1]
            assert all(ends[step] == step + 1 for step in sde) and (first in taken)
            rest = num_steps - first - size
            assert sum(step < first for step in taken) == math.ceil(round(before * first, 9))
            assert sum(first + size <= step < num_steps for step in taken) == math.ceil(round(after * rest, 9))


def test_the_examples_of_the_documentation():
    assert step_ends(Outside(solver_after=0.4), (0, 1), 7) == (1, 2, 4, None, 7, None, None)
    half = Outside(solver_before=0.5, solver_after=0.4)
    assert step_ends(half, (3, 4), 10) == (1, 3, None, 4, 5, 7, None, 10, None, None)
    assert step_ends(half, (), 4) == step_ends(EXACT, (1,), 4) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("window", "places"),
    [
        (FAST, None),
        (
            WindowConfig(kind="consecutive", size=4, range=(0, 6), shift_every=3),
            [lo + k for lo in range(6) for k in range(3)],
        ),
    ],
)
def test_windows_start_where_they_are_drawn(window, places):
    """Places overlap as the range moves on: each move has three."""
    starts = {
        draw_window(window, run_seed=0, uid=f"g{uid}", num_steps=12, step=step).sde_steps[0]
        for uid in range(200)
        for step in range(0, 40)
    }
    assert starts == {*window_starts(window, 12)}
    assert places is None or window_starts(window, 12) == places


KEY = "digen.sampling.outside"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": 1.0}, f"{KEY}.cache must lie in [0, 1), got 1.0; 0.1 is usual"),
        ({"cache": -0.1}, f"{KEY}.cache must lie in [0, 1), got -0.1"),
        ({"cache": 0.1, "cache_max_skips": 0}, f"{KEY}.cache_max_skips must be >= 1, got 0"),
        ({"cache_max_skips": 3}, f"{KEY}.cache_max_skips must be 2 with {KEY}.cache=0"),
        ({"solver_before": 0.0}, f"{KEY}.solver_before must lie in (0, 1], got 0.0"),
        ({"solver_after": 1.5}, f"{KEY}.solver_after must lie in (0, 1], got 1.5"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError) as error:
        Outside(**changes)
    assert str(error.value).startswith(message)


def digen(outside: Outside, window: WindowConfig = FAST, loss: str = "flow_grpo", **sampling) -> DigenConfig:
    return DigenConfig(
        sampling=SamplingConfig(outside=outside, num_steps=10, **sampling), window=window, loss={"name": loss}
    )


CACHE, AFTER, BEFORE = Outside(cache=0.1), Outside(solver_after=0.5), Outside(solver_before=0.5)
EIGHT = Outside(fp8=True)
LATE = WindowConfig(kind="consecutive", size=2, range=(7, 9))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (
            (CACHE, WindowConfig()),
            f"{KEY}.cache must be left out with digen.window.kind=all, whose window is every step",
        ),
        (
            (AFTER, WindowConfig(kind="fraction")),
            f"{KEY}.solver_after must be left out with digen.window.kind=fraction",
        ),
        ((EIGHT, WindowConfig()), f"{KEY}.fp8 must be left out with digen.window.kind=all"),
        ((EIGHT, FAST, "awm"), f"{KEY} must be left out with digen.loss.name=awm, which trains finished pictures"),
        ((CACHE, replace(FAST, size=9, range=(0, 9))), f"{KEY}.cache must be 0 with a window of 9 of 10 steps that"),
        ((AFTER, LATE), f"{KEY}.solver_after must be 1 with a window of 2 of 10 steps that leaves no two steps in a"),
        ((BEFORE, replace(FAST, range=(0, 3))), f"{KEY}.solver_before must be 1 with a window of 3 of 10 steps"),
        ((CACHE, FAST, "diffusion_nft"), f"{KEY} must be left out with digen.loss.name=diffusion_nft, which trains"),
        ((AFTER, FAST, "awm"), f"{KEY} must be left out with digen.loss.name=awm, which trains finished pictures"),
        ((AFTER, FAST, "offline_dpo"), f"{KEY} must be left out with digen.loss.name=offline_dpo"),
    ],
)
def test_what_has_no_steps_outside_a_window_is_refused(refused, message):
    with pytest.raises(ValueError) as error:
        digen(*refused)
    assert str(error.value).startswith(message)
    assert "; " in str(error.value) and "got " in str(error.value)


def test_a_cache_is_refused_with_solvers_that_read_the_steps_before():
    with pytest.raises(
        ValueError, match=r"outside\.cache must be 0 with digen\.sampling\.solver=dpm2, .*got 0\.1; set"
    ):
        digen(CACHE, solver="dpm2")
    digen(AFTER, solver="dpm2")
    digen(CACHE, solver="ddim")


def test_windows_that_leave_steps_outside_are_accepted():
    for outside in (CACHE, AFTER, BEFORE, Outside(0.1, 3, 0.5, 0.5)):
        digen(outside, WindowConfig(kind="consecutive", size=4, range=(0, 4), shift_every=25))
    digen(BEFORE, LATE)
    assert TagConfig().policy == "off", "the rules of preflight are tested in tests/plugin"
