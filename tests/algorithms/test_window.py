# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest

from verl_digen.algorithms.window import Window, WindowConfig, draw_window

CONFIGS = [
    WindowConfig(),
    WindowConfig(kind="consecutive"),
    WindowConfig(kind="consecutive", size=3, range=(1, 6)),
    WindowConfig(kind="consecutive", size=4, range=(0, 4), shift_every=5),
    WindowConfig(kind="consecutive", size=2, range=(2, 5), shift_every=1),
    WindowConfig(kind="fraction"),
    WindowConfig(kind="fraction", fraction=0.01),
    WindowConfig(kind="fraction", fraction=1.0),
]


def draw(config, *, run_seed=0, uid="g0", num_steps=10, step=0):
    return draw_window(config, run_seed=run_seed, uid=uid, num_steps=num_steps, step=step)


def assert_invariants(window, num_steps):
    for steps in (window.sde_steps, window.train_steps):
        assert list(steps) == sorted(set(steps))
        assert all(0 <= step < num_steps - 1 for step in steps)
    assert set(window.train_steps) <= set(window.sde_steps)
    assert window.train_steps


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_windows_keep_the_invariants_in_a_sweep(config):
    for run_seed, uid, num_steps, step in itertools.product((0, 7), range(20), (8, 10, 25), (0, 1, 13, 999)):
        window = draw(config, run_seed=run_seed, uid=f"g{uid}", num_steps=num_steps, step=step)
        assert_invariants(window, num_steps)
        assert window == draw(config, run_seed=run_seed, uid=f"g{uid}", num_steps=num_steps, step=step)
        if config.shift_every is None:
            assert window == draw(config, run_seed=run_seed, uid=f"g{uid}", num_steps=num_steps, step=step + 1)


def test_kind_all_trains_every_step_but_the_last():
    assert draw(WindowConfig(), num_steps=4) == Window(sde_steps=(0, 1, 2), train_steps=(0, 1, 2))


def test_kind_consecutive_draws_every_start_within_its_range():
    config = WindowConfig(kind="consecutive", size=2, range=(1, 5))
    windows = {draw(config, uid=f"g{i}") for i in range(100)}
    assert windows == {Window((i, i + 1), (i, i + 1)) for i in (1, 2, 3)}


def test_kind_consecutive_stays_in_the_first_half_unless_told_otherwise():
    drawn = {step for i in range(100) for step in draw(WindowConfig(kind="consecutive"), uid=f"g{i}").sde_steps}
    assert drawn == {0, 1, 2, 3, 4}


def test_shift_every_moves_the_window_along_the_schedule_and_back_to_its_start():
    config = WindowConfig(kind="consecutive", size=3, range=(0, 3), shift_every=10)
    starts = [draw(config, num_steps=6, step=step).sde_steps[0] for step in range(0, 50, 5)]
    assert starts == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]


def test_kind_fraction_trains_a_share_of_all_stochastic_steps():
    windows = [draw(WindowConfig(kind="fraction"), num_steps=16, uid=f"g{i}") for i in range(200)]
    assert {window.sde_steps for window in windows} == {tuple(range(15))}
    assert {len(window.train_steps) for window in windows} == {9}
    counts = [sum(step in window.train_steps for window in windows) for step in range(15)]
    assert all(90 <= count <= 150 for count in counts)


@pytest.mark.parametrize("config", [WindowConfig(kind="fraction"), WindowConfig(kind="consecutive")], ids=str)
def test_groups_and_runs_draw_different_windows(config):
    assert len({draw(config, uid=f"g{i}") for i in range(30)}) > 3
    assert len({draw(config, run_seed=seed) for seed in range(30)}) > 3


def test_windows_are_the_same_on_every_machine():
    assert draw(WindowConfig(kind="consecutive", range=(0, 9)), run_seed=1, uid="a").sde_steps == (4, 5)
    assert draw(WindowConfig(kind="fraction"), run_seed=1, uid="a").train_steps == (0, 1, 2, 4, 6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(size=0), "digen.window.size must be >= 1, got 0"),
        (dict(shift_every=0), "digen.window.shift_every must be null or >= 1, got 0"),
        (dict(range=(3, 3)), r"digen.window.range must be \[lo, hi\] .* got \[3, 3\]"),
        (dict(range=(-1, 3)), "digen.window.range"),
        (dict(range=(0, 1, 2)), "digen.window.range"),
        (
            dict(kind="consecutive", size=4, range=(1, 4)),
            r"size must be <= the 3 steps of digen.window.range \[1, 4\], got 4; lower the size",
        ),
    ],
)
def test_a_bad_config_value_is_an_error_that_names_the_key(values, message):
    with pytest.raises(ValueError, match=message):
        WindowConfig(**values)


def test_a_window_that_reaches_the_last_step_is_refused():
    config = WindowConfig(kind="consecutive", range=(0, 9))
    config.validate_for(10)
    with pytest.raises(ValueError, match=r"digen.window.range must end at 8 or before with 9 denoise steps"):
        config.validate_for(9)
    with pytest.raises(ValueError, match=r"digen.window.range must end at 8"):
        draw(config, num_steps=9)


def test_a_schedule_too_short_for_the_window_is_refused():
    with pytest.raises(ValueError, match=r"digen.window.size must be <= the 1 steps"):
        WindowConfig(kind="consecutive", size=2).validate_for(3)
