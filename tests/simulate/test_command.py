# SPDX-License-Identifier: Apache-2.0
"""`digen simulate` as a user runs it."""

import json
from argparse import ArgumentParser

import pytest
from PIL import Image

from verl_digen.schedulers.simulation import Event
from verl_digen.simulate import command
from verl_digen.simulate.picture import busy_steps


def digen_simulate(*arguments: str) -> int:
    parser = ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def test_table_json_and_picture_tell_the_same_runs(tmp_path, capsys):
    written, drawn = tmp_path / "runs.json", tmp_path / "runs.png"
    arguments = ("--profile", "wan2.1-14b", "--trainer", "16", "--generator", "16", "--prompts", "4", "--steps", "5")
    assert digen_simulate(*arguments, "--json", str(written), "--picture", str(drawn)) == 0
    data = json.loads(written.read_text())
    names = [
        "as-verl-omni",
        "colocated",
        "colocated+tsp",
        "barrier",
        "gap",
        "gap+tsp",
        "gap+tsp+tag",
        "gap+tsp+tag+tcss",
    ]
    assert [run["name"] for run in data["runs"]] == names
    lines = capsys.readouterr().out.splitlines()
    rows = lines[lines.index("") + 2 :][: len(names)]
    best_s = min(run["step_s"] for run in data["runs"][1:4])
    assert data["best_baseline"]["step_s"] == best_s and f"{best_s:.1f} s/step" in lines[2]
    for run, line in zip(data["runs"], rows, strict=True):
        assert line.startswith(run["name"])
        assert f"{run['step_s']:.1f}" in line.split()
        assert f"{best_s / run['step_s']:.2f}x" in line.split()
        assert run["speedup"] == pytest.approx(best_s / run["step_s"])
        assert run["samples_per_device_s"] == pytest.approx(4 * 8 / run["step_s"] / 32)
    assert data["numbers"]["num_prompts"] == {"value": 4, "source": "chosen: --prompts"}
    assert all(entry["source"] for entry in data["numbers"].values())
    with Image.open(drawn) as picture:
        assert picture.width > 1000 and len(picture.convert("L").getcolors() or []) > 5


def test_the_published_step_is_simulated_with_the_published_window(tmp_path):
    written = tmp_path / "runs.json"
    arguments = (
        "--profile",
        "qwen-image-20b",
        "--devices",
        "4",
        "--window",
        "2",
        "--steps",
        "4",
        "--techniques",
        "gap",
    )
    assert digen_simulate(*arguments, "--json", str(written)) == 0
    data = json.loads(written.read_text())
    assert data["numbers"]["num_trained_steps"] == {"value": 2, "source": "chosen: another window"}
    published = data["runs"][0]
    assert published["name"] == "as-verl-omni" and published["step_s"] == pytest.approx(420, rel=0.05)
    assert published["samples_per_device_s"] == pytest.approx(0.305, rel=0.05)
    assert data["best_baseline"]["name"] == "colocated+tsp", "the published run is no baseline of ours"


def test_each_run_gets_its_own_best_split_and_a_slower_one_is_not_taken(tmp_path):
    written = tmp_path / "runs.json"
    arguments = ("--profile", "qwen-image-20b", "--prompts", "8", "--steps", "4", "--techniques", "gap,tsp")
    assert digen_simulate(*arguments, "--devices", "8", "--json", str(written)) == 0
    best = {run["name"]: run["step_s"] for run in json.loads(written.read_text())["runs"]}
    assert digen_simulate(*arguments, "--trainer", "4", "--generator", "4", "--json", str(written)) == 0
    halves = {run["name"]: run["step_s"] for run in json.loads(written.read_text())["runs"]}
    assert list(best) == list(halves) == ["as-verl-omni", "colocated", "colocated+tsp", "barrier", "gap", "gap+tsp"]
    assert best["colocated+tsp"] == halves["colocated+tsp"]
    assert all(best[name] <= halves[name] for name in best)
    assert best["gap+tsp"] < halves["gap+tsp"]


def test_two_device_types_are_compared_with_all_at_the_slower_speed_and_with_either_alone(capsys):
    arguments = ("--profile", "flux1-12b", "--trainer", "8xH800", "--generator", "8xH20", "--techniques", "gap")
    assert digen_simulate(*arguments, "--prompts", "2", "--steps", "4") == 0
    out = capsys.readouterr().out
    for devices in ("16 together, as H20", "8xH800 alone", "8xH20 alone", "8xH800 + 8xH20"):
        assert devices in out


ON_8 = ("--profile", "flux1-12b", "--devices", "8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profile", "nothing", "--devices", "8"), "shipped are flux1-12b, hunyuanvideo-13b, qwen-image-20b"),
        (("--profile", "flux1-12b"), "--devices, or --trainer and --generator"),
        (("--profile", "flux1-12b", "--devices", "8", "--trainer", "4"), "--devices, or --trainer and --generator"),
        (("--profile", "flux1-12b", "--trainer", "4"), "--devices, or --trainer and --generator"),
        (("--profile", "flux1-12b", "--devices", "8", "--techniques", "gap,pap"), "got 'pap'"),
        (("--profile", "flux1-12b", "--devices", "8", "--window", "17"), "trained steps must lie in [1, 16]"),
        (("--profile", "flux1-12b", "--devices", "8", "--prompts", "0"), "--prompts must be >= 1, got 0"),
        (("--profile", "flux1-12b", "--devices", "8", "--slots-per-replica", "4"), "must be left out without --turns"),
        (
            ("--profile", "flux1-12b", "--devices", "8", "--turns", "2", "--techniques", "tag"),
            "without tag with --turns",
        ),
        (
            ("--profile", "flux1-12b", "--devices", "8", "--turns", "2", "--environment-latency", "1s"),
            "must be MEAN or MEAN:STD in seconds, got '1s'",
        ),
        (("--profile", "flux1-12b", "--devices", "8", "--stale-fraction", "2"), "fraction must lie in (0, 1], got 2.0"),
        ((*ON_8, "--jitter", "-1"), "--jitter must lie in [0, 10]"),
        ((*ON_8, "--rank-skew", "nan"), "--rank-skew must lie in [0, 10]"),
        ((*ON_8, "--slow-devices", "1/x"), "must be COUNT, COUNT/OF or COUNT/OF:FACTOR, got '1/x'; e.g. 1/32:2"),
        ((*ON_8, "--slow-devices", "9"), "--slow-devices must be <= 8, all devices, got 9"),
        ((*ON_8, "--slow-place", "generator"), "--slow-place must be left out without --slow-devices"),
        ((*ON_8, "--save-freq", "5"), "--save-freq must be left out without --failures, got 5; give that, too"),
        ((*ON_8, "--seed", "5"), "--seed must be left out without --jitter, --rank-skew, --slow-devices or --failures"),
        ((*ON_8, "--failures", "-1"), "--failures must be >= 0 and finite, got -1.0"),
        ((*ON_8, "--jitter", "0.1", "--turns", "2"), "--turns must be left out with --jitter"),
    ],
)
def test_what_cannot_be_simulated_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert digen_simulate(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_episodes_begin_in_lock_step_and_leave_tag_out(tmp_path, capsys):
    written = tmp_path / "runs.json"
    arguments = ("--profile", "wan2.1-14b", "--trainer", "16", "--generator", "16", "--prompts", "4", "--steps", "5")
    episodes = ("--turns", "3", "--environment-latency", "20:30", "--slots-per-replica", "4", "--extra-episodes", "2")
    drawn = ("--picture", str(tmp_path / "runs.png"))
    assert digen_simulate(*arguments, *episodes, "--extra-prompts", "1", "--json", str(written), *drawn) == 0
    data = json.loads(written.read_text())
    assert [run["name"] for run in data["runs"]] == [
        "lock-step+tsp",
        "colocated",
        "colocated+tsp",
        "colocated+tsp+redundant",
        *(f"{name}+redundant" for name in ("barrier", "gap", "gap+tsp", "gap+tsp+tcss")),
    ]
    assert data["episodes"]["latency"] == {"mean_s": 20.0, "std_s": 30.0}
    assert data["episodes"]["slots_per_replica"] == 4 and data["episodes"]["num_turns"] == 3
    assert "a sample is an episode of 3 turns; environment 20 s a turn" in capsys.readouterr().out


def test_variance_is_said_and_written_and_drawn_from_its_seed(tmp_path, capsys):
    written, drawn = tmp_path / "runs.json", tmp_path / "runs.png"
    arguments = ("--profile", "wan2.1-14b", "--trainer", "16", "--generator", "16", "--prompts", "4", "--steps", "6")
    variance = (
        "--jitter",
        "0.1",
        "--rank-skew",
        "0.05",
        "--slow-devices",
        "1/16:3",
        "--failures",
        "2e-5",
        "--seed",
        "4",
    )
    assert digen_simulate(*arguments, *variance, "--json", str(written), "--picture", str(drawn)) == 0
    out = capsys.readouterr().out
    assert "variance, seed 4: jitter 0.1; ranks skewed by 0.05; 2 of 32 devices take 3 times as long; 2e-05" in out
    assert "% of the time for stops, expected; 0 replicas died in the simulated steps" in out and drawn.exists()
    data = json.loads(written.read_text())
    assert data["variance"]["slow"] == {"count": 1, "of": 16, "factor": 3.0, "place": "anywhere"}
    names = [run["name"] for run in data["runs"]]
    assert names[:5] == ["as-verl-omni", "colocated", "colocated+tsp", "colocated+tsp, shared queue", "barrier"]
    assert all(0 < run["stopped"] < 0.01 and run["bound_s"] is None for run in data["runs"])
    assert digen_simulate(*arguments, *variance, "--json", str(written)) == 0
    assert json.loads(written.read_text())["runs"] == data["runs"]
    assert digen_simulate(*arguments, *variance[:-1], "5", "--json", str(written)) == 0
    assert json.loads(written.read_text())["runs"] != data["runs"]


def test_busy_shares_are_those_of_the_window():
    events = [
        Event(f"s{index}", "generate", start, end, (0,)) for index, start, end in ((0, 0, 4), (1, 2, 6), (0, 9, 10))
    ]
    times, shares = busy_steps(events, 1.0, 8.0, num_slots=2)
    assert list(zip(times, shares, strict=True)) == [(0.0, 0.0), (0.0, 0.5), (1.0, 1.0), (3.0, 0.5), (5.0, 0.0)]
