# SPDX-License-Identifier: Apache-2.0
"""`digen simulate` as a user runs it."""

import pytest

from tests.grid import IN_GRID
from verl_digen import cli


def digen_simulate(*arguments: str) -> int:
    return cli.main(["simulate", *arguments])


def rows_of(text: str) -> dict[str, list[str]]:
    """Run -> cells of its row of the table, from the devices on."""
    lines = text.splitlines()
    rows = lines[lines.index("") + 2 :]
    return {row.split()[0]: row.split()[1:] for row in rows[: rows.index("")]}


def test_the_table_compares_each_run_with_the_fastest_baseline(capsys):
    arguments = ("--profile", "wan2.1-14b", "--trainer", "16", "--generator", "16", "--prompts", "4", "--steps", "5")
    assert digen_simulate(*arguments, "--window", "9") == 0
    text = capsys.readouterr().out
    rows = rows_of(text)
    assert list(rows) == ["colocated", "colocated+tsp", "barrier", "gap", "gap+tsp", "gap+tsp+tag", "gap+tsp+tag+tcss"]
    assert "4 prompts x 8 samples per step, 9 of 20 denoise steps trained" in text
    step_s = {name: next(float(cell) for cell in cells if "." in cell) for name, cells in rows.items()}
    best_s = min(step_s[name] for name in ("colocated", "colocated+tsp", "barrier"))
    assert f"{best_s:.1f} s/step" in text
    for name, cells in rows.items():
        ratio = next(float(cell[:-1]) for cell in cells if cell.endswith("x") and cell[0].isdigit())
        assert ratio == pytest.approx(best_s / step_s[name], abs=0.02), name


def test_each_run_gets_its_own_best_split_and_a_slower_one_is_not_taken(capsys):
    arguments = ("--profile", "qwen-image-20b", "--prompts", "8", "--steps", "4", "--techniques", "gap,tsp")
    seconds = []
    for devices in (("--devices", "8"), ("--trainer", "4", "--generator", "4")):
        assert digen_simulate(*arguments, *devices) == 0
        rows = rows_of(capsys.readouterr().out)
        seconds.append({name: next(float(cell) for cell in cells if "." in cell) for name, cells in rows.items()})
    best, halves = seconds
    assert list(best) == list(halves) == ["colocated", "colocated+tsp", "barrier", "gap", "gap+tsp"]
    assert best["colocated+tsp"] == halves["colocated+tsp"]
    assert all(best[name] <= halves[name] for name in best)
    assert best["gap+tsp"] < halves["gap+tsp"]


@pytest.mark.parametrize(
    ("seconds", "advice"),
    [
        ("0", "so: one pool, 8xH100 together (colocated+tsp); two are not faster by more than 5%"),
        pytest.param(
            "10",
            "so: two pools, 7xH100 + 1xH100 (gap+tsp+tag, every sample on-policy), 1.06 times as fast as colocated+tsp",
            marks=IN_GRID,
        ),
        (
            "600",
            "so: two pools, 6xH100 + 2xH100 (gap+tsp+tag+tcss, digen.staleness.max_versions=1), 1.97 times as fast as",
        ),
    ],
)
def test_the_advice_follows_the_time_that_rewards_take(seconds, advice, capsys):
    arguments = ("--profile", "sd3.5-medium", "--devices", "8", "--steps", "8", "--reward-s", seconds)
    assert digen_simulate(*arguments) == 0
    assert advice in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profile", "nothing", "--devices", "8"), "shipped are flux1-12b, hunyuanvideo-13b, qwen-image-20b"),
        (("--profile", "flux1-12b"), "--devices, or --trainer and --generator"),
        (("--profile", "flux1-12b", "--trainer", "4"), "--devices, or --trainer and --generator"),
        (("--profile", "flux1-12b", "--devices", "8", "--window", "17"), "trained steps must lie in [1, 16]"),
        (("--profile", "flux1-12b", "--devices", "8", "--techniques", "gap,x"), "--techniques must be among gap, tsp"),
        (("--profile", "flux1-12b", "--devices", "8", "--prompts", "0"), "--prompts must be >= 1, got 0"),
        (("--profile", "flux1-12b", "--devices", "8", "--reward-s", "-1"), "--reward-s must be >= 0, got -1"),
    ],
)
def test_what_cannot_be_simulated_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert digen_simulate(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
