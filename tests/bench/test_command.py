# SPDX-License-Identifier: Apache-2.0
"""`digen bench` as a user types it: what is refused before anything runs, and what a bench that ends early leaves."""

import json
from argparse import ArgumentParser
from pathlib import Path

import pytest

from verl_digen.bench import command
from verl_digen.bench.runs import RunFailed, RunResult


def digen_bench(*arguments: str) -> int:
    parser = ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--modes", "fast"),
            "--modes must be among colocated, colocated+tsp, barrier, gap, gap+tsp, gap+tsp+tag, gap+tsp+tag+tcss, got "
            "'fast'",
        ),
        (("--steps", "2", "--warm-up", "2"), "--steps must be > --warm-up >= 0, got (2, 2)"),
        (("--modes", "gap,gap"), "--modes must name a mode once"),
        (("--repeats", "0"), "--repeats must be >= 1, got 0"),
        (("--", "digen.nothing=7"), "the config cannot be composed: "),
    ],
)
def test_what_cannot_run_is_one_line_before_anything_runs(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert digen_bench(*arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"digen bench: {message}") and len(told.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_devices_of_rewards_count_for_every_mode():
    def setup_of(*arguments: str) -> command.BenchSetup:
        parser = ArgumentParser()
        command.add_arguments(parser)
        return command._setup(parser.parse_args(arguments))

    assert setup_of().num_devices == 2
    setup = setup_of("--", "digen.reward.functions={shapes: {weight: 1.0, num_workers: 3, num_gpus: 1}}")
    assert (setup.num_shared, setup.num_reward_devices, setup.num_devices) == (2, 3, 5)


def test_an_earlier_bench_is_not_written_over(tmp_path, capsys):
    (tmp_path / "bench.json").write_text("{}")
    assert digen_bench("--out", str(tmp_path), "--", "digen.seed=1") == 2
    assert "--out must be a new or an empty folder" in capsys.readouterr().err


STEP = {"perf/step_s": 2.0, "perf/images_per_s": 4.0, "reward/mean": 0.5}


@pytest.mark.parametrize("ends", [RunFailed("gap, repeat 3: exit code 1"), KeyboardInterrupt()], ids=["fails", "stops"])
def test_the_repeats_that_are_whole_are_shown_when_a_run_fails_or_is_stopped(tmp_path, monkeypatch, capsys, ends):
    def run_mode(work, mode, repeat, out):
        if (repeat, mode.name) == (2, "gap"):
            raise ends
        return RunResult(mode, repeat, Path(out), (STEP,) * work.num_steps, wall_s=9.0)

    monkeypatch.setattr(command, "run_mode", run_mode)
    arguments = ("--modes", "barrier,gap", "--repeats", "4", "--steps", "3", "--out", str(tmp_path))
    if isinstance(ends, RunFailed):
        assert digen_bench(*arguments) == 1
    else:
        with pytest.raises(KeyboardInterrupt):
            digen_bench(*arguments)
    told = capsys.readouterr()
    assert "only 2 of 4 repeats are whole" in told.out and "run 5/8: barrier #3" in told.out
    assert told.err == (f"digen bench: {ends}\n" if isinstance(ends, RunFailed) else "")
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["setting"]["num_repeats"] == 2 and len(found["runs"]) == 4


def test_a_bench_whose_first_repeat_fails_has_no_table(tmp_path, monkeypatch, capsys):
    def run_mode(work, mode, repeat, out):
        if mode.name == "gap":
            raise RunFailed("gap, repeat 1: exit code 1")
        return RunResult(mode, repeat, Path(out), (STEP,) * work.num_steps, wall_s=9.0)

    monkeypatch.setattr(command, "run_mode", run_mode)
    assert digen_bench("--modes", "barrier,gap", "--out", str(tmp_path)) == 1
    assert "whole" not in capsys.readouterr().out and not (tmp_path / "bench.json").exists()
