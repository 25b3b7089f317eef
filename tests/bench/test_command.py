# SPDX-License-Identifier: Apache-2.0
"""`digen bench` as a user types it: what is refused before anything runs."""

from argparse import ArgumentParser

import pytest

from verl_digen.bench import command


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
        (("--repeats", "0"), "--repeats must be >= 1, got 0"),
        (("--time-scale", "0.1"), "--time-scale needs --virtual, got 0.1"),
        (("--virtual", "wan"), "--profile must be a file or one of the shipped profiles, got 'wan'"),
        (("--virtual", "wan2.1-14b", "--modes", "colocated"), "--modes must have separate pools with --virtual"),
        (("--virtual", "hunyuanvideo-13b", "--trainer", "2"), "--trainer must be >= 5 devices"),
        (("--profile", "mine.json"), "--profile needs --device, the type of the devices that are measured"),
    ],
)
def test_what_cannot_run_is_one_line_before_anything_runs(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert digen_bench(*arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"digen bench: {message}") and len(told.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_an_earlier_bench_is_not_written_over(tmp_path, capsys):
    (tmp_path / "bench.json").write_text("{}")
    assert digen_bench("--out", str(tmp_path), "--", "digen.seed=1") == 2
    assert "--out must be a new or an empty folder" in capsys.readouterr().err
