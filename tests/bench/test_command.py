# SPDX-License-Identifier: Apache-2.0
"""`digen bench` as a user types it: what is refused before anything runs, and what a bench that ends early leaves."""

import json
import sys
from pathlib import Path

import pytest

from verl_digen import cli
from verl_digen.tools.bench import command, runs
from verl_digen.tools.bench.modes import MODES, interleaved, parse_modes
from verl_digen.tools.bench.runs import BenchWork, RunFailed, RunResult


def digen_bench(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


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
        return command._setup(cli.make_parser().parse_args(["bench", *arguments]))

    assert setup_of().num_devices == 2
    setup = setup_of("--", "digen.reward.functions={jpeg_compressibility: {weight: 1.0, num_workers: 3, num_gpus: 1}}")
    assert (setup.num_shared, setup.num_reward_devices, setup.num_devices) == (2, 3, 5)


def test_an_earlier_bench_is_not_written_over(tmp_path, capsys):
    (tmp_path / "bench.json").write_text("{}")
    assert digen_bench("--out", str(tmp_path), "--", "digen.seed=1") == 2
    assert "--out must be a new or an empty folder" in capsys.readouterr().err


STEP = {"perf/step_s": 2.0, "perf/images_per_s": 4.0, "reward/mean": 0.5}


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [(RunFailed("gap: exit code 1"), 1, "gap: exit code 1"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_the_repeats_that_are_whole_are_shown_when_a_run_fails_or_is_stopped(
    tmp_path, monkeypatch, capsys, ends, code, said
):
    def run_mode(work, mode, repeat, out):
        if (repeat, mode.name) == (2, "gap"):
            raise ends
        return RunResult(mode, repeat, Path(out), (STEP,) * work.num_steps, wall_s=9.0)

    monkeypatch.setattr(command, "run_mode", run_mode)
    arguments = ("--modes", "barrier,gap", "--repeats", "4", "--steps", "3", "--out", str(tmp_path))
    assert digen_bench(*arguments) == code
    told = capsys.readouterr()
    assert "only 2 of 4 repeats are whole" in told.out and "run 5/8: barrier #3" in told.out
    assert told.err == f"digen bench: {said}\n"
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


# -- the modes that are compared, and their order ------------------------------------------------------------
def test_separate_modes_differ_in_the_switches_of_their_techniques_alone():
    separate = [mode for mode in MODES.values() if mode.is_disaggregated]
    assert [mode.name for mode in separate] == ["barrier", "gap", "gap+tsp", "gap+tsp+tag", "gap+tsp+tag+tcss"]
    assert {mode.recipes for mode in separate} == {("disaggregated",)}
    switched = {mode.name: dict(override.split("=") for override in mode.overrides) for mode in separate}
    keys = {"digen.gap.enable", "digen.tsp.enable", "digen.tag.policy", "digen.staleness.max_versions"}
    for mode in separate:
        # tiles of several timesteps are what is compared, not what is given
        assert switched[mode.name].keys() - {"digen.tsp.steps_per_tile"} == keys
        assert switched[mode.name]["digen.tag.policy"] == ("bts" if "tag" in mode.techniques else "off")
        assert switched[mode.name]["digen.staleness.max_versions"] == str(int("tcss" in mode.techniques))
        for technique in ("gap", "tsp"):
            assert switched[mode.name][f"digen.{technique}.enable"] == str(technique in mode.techniques).lower()


def test_a_colocated_run_is_there_with_the_same_tiles_as_separate_pools_have_and_without():
    with_tsp, without = MODES["colocated+tsp"], MODES["colocated"]
    assert with_tsp.recipes == without.recipes == ()
    assert set(with_tsp.overrides) <= set(MODES["gap+tsp"].overrides)
    assert set(without.overrides) <= set(MODES["gap"].overrides)
    assert with_tsp.overrides == ("digen.tsp.enable=true",)


def test_repeats_are_interleaved():
    order = interleaved(parse_modes("barrier,gap"), 3)
    assert [(repeat, mode.name) for repeat, mode in order] == [
        *((0, "barrier"), (0, "gap")),
        *((1, "barrier"), (1, "gap")),
        *((2, "barrier"), (2, "gap")),
    ]


# -- a run ----------------------------------------------------------------------------------------------------
WORK = BenchWork(("digen_quickstart",), ("digen.seed=7", "trainer.logger=[console]"), num_steps=2)
MAIN = """
import json, pathlib, sys
folder, rows = pathlib.Path(sys.argv[1]), [{"step": 0, "val/reward": 0.1}]
print(*(f"line {number}" for number in range(100)), sep="\\n")
rows += [{"step": step, "perf/step_s": 2.0} for step in range(1, 1 + int(sys.argv[2]))]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
sys.exit(int(sys.argv[3]))
"""
"""Stands in for verl's main: FOLDER STEPS CODE."""


def run_gap(out: Path, monkeypatch, *, num_done: int, exit_code: int) -> tuple[RunResult, list[str]]:
    """Run `gap` a second time, with a main that does so many steps -> its result and its real command line."""
    commands = []

    def command_of(*given):
        commands.append(real(*given))
        return [sys.executable, "-c", MAIN, str(given[-1]), str(num_done), str(exit_code)]

    real = runs.command_of
    monkeypatch.setattr(runs, "command_of", command_of)
    return runs.run_mode(WORK, MODES["gap"], 1, out), commands[0]


def test_a_run_is_verls_main_with_the_users_overrides_last_and_has_its_steps_alone(tmp_path, monkeypatch):
    run, command = run_gap(tmp_path, monkeypatch, num_done=2, exit_code=0)
    assert [row["step"] for row in run.steps] == [1, 2] and run.run_dir == tmp_path / "gap-2"
    assert command[1:4] == ["-m", "verl.trainer.main_ppo", "recipe=digen_quickstart+disaggregated"]
    assert command.index("digen.gap.enable=true") < command.index("digen.seed=7")
    assert command.index("trainer.logger=[]") < command.index("trainer.logger=[console]")
    assert "trainer.total_training_steps=2" in command
    assert f"trainer.default_local_dir={run.run_dir}" in command


@pytest.mark.parametrize(("exit_code", "num_done"), [(1, 2), (0, 1)])
def test_a_run_that_failed_or_ended_early_is_an_error_with_its_log(tmp_path, monkeypatch, exit_code, num_done):
    with pytest.raises(RunFailed) as told:
        run_gap(tmp_path, monkeypatch, num_done=num_done, exit_code=exit_code)
    text = str(told.value)
    assert text.startswith(f"gap, repeat 2: exit code {exit_code}, {num_done} of 2 steps were done; ")
    assert str(tmp_path / "gap-2" / "console.log") in text
    assert text.endswith("line 99") and "line 80" in text and "line 79" not in text
