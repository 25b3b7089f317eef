# SPDX-License-Identifier: Apache-2.0
"""`digen simulate` as a user runs it."""

import json

import pytest

from tests.grid import IN_GRID
from verl_digen import cli


def digen_simulate(*arguments: str) -> int:
    return cli.main(["simulate", *arguments])


def test_table_and_json_tell_the_same_runs(tmp_path, capsys):
    written = tmp_path / "runs.json"
    arguments = ("--profile", "wan2.1-14b", "--trainer", "16", "--generator", "16", "--prompts", "4", "--steps", "5")
    arguments += ("--window", "9")
    assert digen_simulate(*arguments, "--json", str(written)) == 0
    data = json.loads(written.read_text())
    names = ["colocated", "colocated+tsp", "barrier", "gap", "gap+tsp", "gap+tsp+tag", "gap+tsp+tag+tcss"]
    assert [run["name"] for run in data["runs"]] == names
    lines = capsys.readouterr().out.splitlines()
    rows = lines[lines.index("") + 2 :][: len(names)]
    best_s = min(run["step_s"] for run in data["runs"][:3])
    assert data["best_baseline"]["step_s"] == best_s and f"{best_s:.1f} s/step" in lines[2]
    for run, line in zip(data["runs"], rows, strict=True):
        assert line.startswith(run["name"])
        assert f"{run['step_s']:.1f}" in line.split()
        assert f"{best_s / run['step_s']:.2f}x" in line.split()
        assert run["speedup"] == pytest.approx(best_s / run["step_s"])
        assert run["samples_per_device_s"] == pytest.approx(4 * 8 / run["step_s"] / 32)
    assert data["numbers"]["num_prompts"] == {"value": 4, "source": "chosen: --prompts"}
    assert data["numbers"]["num_trained_steps"] == {"value": 9, "source": "chosen: another window"}
    assert all(entry["source"] for entry in data["numbers"].values())


def test_each_run_gets_its_own_best_split_and_a_slower_one_is_not_taken(tmp_path):
    written = tmp_path / "runs.json"
    arguments = ("--profile", "qwen-image-20b", "--prompts", "8", "--steps", "4", "--techniques", "gap,tsp")
    assert digen_simulate(*arguments, "--devices", "8", "--json", str(written)) == 0
    best = {run["name"]: run["step_s"] for run in json.loads(written.read_text())["runs"]}
    assert digen_simulate(*arguments, "--trainer", "4", "--generator", "4", "--json", str(written)) == 0
    halves = {run["name"]: run["step_s"] for run in json.loads(written.read_text())["runs"]}
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
    arguments = ("--profile", "sd3.5-medium", "--devices", "8", "--steps", "8", "--reward-seconds", seconds)
    assert digen_simulate(*arguments) == 0
    assert advice in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profile", "nothing", "--devices", "8"), "shipped are flux1-12b, hunyuanvideo-13b, qwen-image-20b"),
        (("--profile", "flux1-12b"), "--devices, or --trainer and --generator"),
        (("--profile", "flux1-12b", "--trainer", "4"), "--devices, or --trainer and --generator"),
        (("--profile", "flux1-12b", "--devices", "8", "--window", "17"), "trained steps must lie in [1, 16]"),
        (("--profile", "flux1-12b", "--devices", "8", "--prompts", "0"), "--prompts must be >= 1, got 0"),
        (
            ("--profile", "flux1-12b", "--devices", "8", "--reward-seconds", "-1"),
            "--reward-seconds must be >= 0, got -1",
        ),
    ],
)
def test_what_cannot_be_simulated_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert digen_simulate(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
