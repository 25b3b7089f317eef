# SPDX-License-Identifier: Apache-2.0
"""Checks in processes of their own, with small programs in place of the checks, and what is printed of them."""

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from verl_digen import cli
from verl_digen.tools.checkup import command
from verl_digen.tools.checkup.checks import CHECKS, Setting
from verl_digen.tools.checkup.command import Outcome, to_table
from verl_digen.tools.checkup.training import quickstart_override

SHORT = [name for name, check in CHECKS.items() if not check.is_full]
PROGRAM = """
import json, os, signal, subprocess, sys, time
name, setting = sys.argv[1], json.load(sys.stdin)
def say(**said): open(setting["folder"] + "/outcome.json", "w").write(json.dumps(said))
way = os.environ.get("VERL_PLATFORM", name)
open(setting["folder"] + "/figures.jsonl", "w").write(json.dumps({"what": "speed", "gb_s": 1.25, "way": way}) + "\\n")
print("imports", flush=True)
if name == "numerics": say(cause="too far off")
if name == "attention": say(figure=f"{setting['num_devices']} devices")
if name == "gradient": say(cause="no link")
if name == "update": os.kill(os.getpid(), signal.SIGSEGV)
if name == "sleep":
    child = subprocess.Popen(["sleep", "300"])
    print(child.pid, flush=True)
    time.sleep(300)
if name == "training": print("no such module"); sys.exit(3)
"""


class Process(subprocess.Popen[str]):
    """A check's process; what hangs has hung for its whole deadline when it has written its last line."""

    clock_s = 0.0

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        if list(self.args)[-1] != "sleep":  # pyright: ignore[reportArgumentType]
            return super().communicate(input, timeout)
        assert self.stdin is not None and input is not None and timeout is not None
        self.stdin.write(input)
        self.stdin.close()
        log = Path(json.loads(input)["folder"]) / command.LOG
        while not re.search(r"^\d+\n", log.read_text(), re.MULTILINE):
            assert self.poll() is None, log.read_text()
            time.sleep(0.01)
        Process.clock_s += timeout
        raise subprocess.TimeoutExpired(self.args, timeout)


@pytest.fixture(scope="module", autouse=True)
def no_time_is_lost() -> Iterator[None]:
    """Waiting for a check that hangs takes no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VERL_PLATFORM", raising=False)
        patch.setattr(command, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Process}))
        patch.setattr(command, "time", SimpleNamespace(monotonic=lambda: Process.clock_s))
        yield


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checks")


@pytest.fixture(scope="module")
def outcomes(no_time_is_lost: None, tmp: Path) -> dict[str, Outcome]:
    given = Setting(tmp, num_devices=2, architecture="sd3")
    program = (sys.executable, "-c", PROGRAM)
    return {one.name: one for one in command.run_checks(SHORT, given, program=program)}


def test_a_check_that_fails_dies_or_hangs_stops_no_other(outcomes: dict[str, Outcome], tmp: Path):
    assert [name for name, one in outcomes.items() if one.passed] == ["attention"]
    assert outcomes["attention"].figure == "2 devices"
    causes = {name: one.cause for name, one in outcomes.items() if not one.passed}
    assert causes == {
        "numerics": "too far off",
        "gradient": "no link",
        "update": "its process was ended by SIGSEGV; its last line: imports",
        "sleep": f"it was not done after {CHECKS['sleep'].deadline_s:.3g} s",
        "training": "its process ended with exit code 3; its last line: no such module",
    }
    assert outcomes["update"].remedy == f"{CHECKS['update'].remedy}; the log: {tmp / 'update' / 'log.txt'}"
    child = int((tmp / "sleep" / "log.txt").read_text().split()[-1])
    deadline_s = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "a process outlives its check"
        time.sleep(0.01)


def test_a_line_each_and_a_table_with_cause_and_remedy(outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture):
    assert list(command.report(SHORT, outcomes.values())) == list(outcomes.values())
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("FAIL  numerics") and lines[2] == "      cause  too far off"
    assert lines[1] == "      speed: gb_s 1.25, way numerics"
    assert lines[3].startswith("      remedy compare with `digen doctor --selftest")
    assert lines[4].startswith("pass  attention") and lines[4].endswith("2 devices")
    assert to_table(list(outcomes.values())) in out and "| gradient | FAIL | " in out
    assert "FAILED: numerics,gradient,update,sleep,training" in lines[-1]


def test_a_budget_ends_a_check_and_leaves_out_those_that_no_longer_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setitem(command.CHECKS, "sleep", replace(CHECKS["sleep"], least_s=0.5))
    given = Setting(tmp_path / "out", num_devices=1, architecture="sd3", is_cpu=True)
    names = ["sleep", "attention"]
    outcomes = command.run_checks(names, given, budget_s=2.0, program=(sys.executable, "-c", PROGRAM))
    (killed,) = command.report(names, outcomes, tmp_path)
    assert killed.cause == "it was not done after 2 s"
    assert killed.measured == [{"what": "speed", "gb_s": 1.25, "way": "cpu"}], "what it noted before is kept"
    text = (tmp_path / "report.md").read_text()
    assert "Left out for lack of time: attention." in text and text == capsys.readouterr().out
    noted = json.loads((tmp_path / "figures.jsonl").read_text())
    assert noted == {"check": "sleep", "what": "speed", "gb_s": 1.25, "way": "cpu"}


def arguments(*words: str):
    return cli.make_parser().parse_args(["doctor", *words])


def test_options_choose_the_checks_and_the_exit_code_is_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
):
    asked = []

    def run_checks(names, given, *, budget_s):
        asked.append((names, given, budget_s))
        yield from (Outcome(name, name != "update", 1.0, "fine", "broken" * (name == "update")) for name in names)

    monkeypatch.setattr(command, "run_checks", run_checks)
    words = ("--gpu", "--device", "cpu", "--architecture", "sd3", "--skip", "training")
    assert command.run(arguments(*words, "--skip", "update", "--json", str(tmp_path / "out.json"))) == 0
    (names, given, budget_s) = asked[0]
    assert budget_s == math.inf
    assert names == ["numerics", "attention", "gradient", "sleep"] and given.is_cpu
    assert (given.architecture, given.num_devices) == ("sd3", 1) and not given.folder.exists()
    written = json.loads((tmp_path / "out.json").read_text())
    assert [check["passed"] for check in written["checks"]] == [True] * 4 and written["device"] == "cpu"
    capsys.readouterr()
    assert command.run(arguments(*words)) == 1
    assert "FAIL  update" in capsys.readouterr().out
    assert asked[1][1].folder.exists(), "logs of failed checks stay"
    asked[1][1].folder.rmdir()
    command.run(arguments("--gpu", "--device", "cpu", "--full", "--budget", "90", "--skip", "sd3"))
    assert asked[2][0] == [name for name in CHECKS if name != "sd3"] and asked[2][2] == 90
    command.run(arguments("--gpu", "--device", "cpu", "--only", "sd3", "--out", str(tmp_path / "kept")))
    assert asked[3][0] == ["sd3"] and asked[3][1].folder == tmp_path / "kept" and asked[3][1].folder.exists()


def test_a_budget_in_which_nothing_ran_is_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert command.run(arguments("--gpu", "--device", "cpu", "--budget", "1", "--out", str(tmp_path))) == 1
    assert "NOTHING WAS CHECKED" in capsys.readouterr().out


def test_without_an_accelerator_nothing_runs_unless_the_cpu_is_asked_for(capsys: pytest.CaptureFixture):
    assert cli.main(["doctor", "--gpu"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "no accelerator that PyTorch can use" in captured.err
    assert "--device cpu runs the same checks" in captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--architecture", "wan2.3"), "did you mean wan2.1?"),
        (("--skip", "sleping"), "did you mean sleep?"),
        (("--json", "no/such/folder/x"), "--json must be in a folder that is there"),
    ],
)
def test_a_bad_option_is_told_before_a_check_runs(capsys: pytest.CaptureFixture, words: tuple[str, ...], said: str):
    assert cli.main(["doctor", "--gpu", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_quick_start_takes_the_devices_that_divide_its_prompts_or_two_ranks_that_share_the_cores():
    cases = {(1, 64): 1, (3, 64): 2, (7, 64): 4, (8, 64): 8, (16, 64): 8, (0, 1): 1, (0, 2): 2, (0, 64): 2}
    assert {case: quickstart_override(*case) for case in cases} == {
        case: f"trainer.n_gpus_per_node={ranks}" if ranks > 1 else "" for case, ranks in cases.items()
    }
