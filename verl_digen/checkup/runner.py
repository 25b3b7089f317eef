# SPDX-License-Identifier: Apache-2.0
"""Runs checks, each in a process of its own with a deadline, so that none can stop or disturb the others.

Invariants (tests/checkup/test_runner.py): a check that raises, dies or hangs is a failed outcome with a cause, and the
checks after it run; no process of a check outlives it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import inf
from pathlib import Path

import psutil

from verl_digen.checkup.__main__ import OUTCOME
from verl_digen.checkup.outcome import Outcome
from verl_digen.checkup.registry import CHECKS, CheckSpec
from verl_digen.checkup.setting import FIGURES, Setting

LOG = "log.txt"
PROGRAM = (sys.executable, "-W", "ignore", "-m", "verl_digen.checkup")


def run_checks(
    names: Sequence[str],
    setting: Setting,
    *,
    variables: Mapping[str, str],
    budget_s: float = inf,
    program: Sequence[str] = PROGRAM,
) -> Iterator[Outcome]:
    """Run the checks one after another; yields each outcome when it is known.

    Args:
        setting: its `folder` gets a folder for each check.
        variables: environment variables of the checks' processes, besides this process's.
        budget_s: seconds for all of them; a check is killed where they end, and one that no longer fits is left out.
        program: command line before the check's name.
    """
    ends_s = time.monotonic() + budget_s
    for name in names:
        began_s = time.monotonic()
        if ends_s - began_s < CHECKS[name].least_s:
            continue
        folder, check = setting.folder / name, CHECKS[name]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        check = replace(check, deadline_s=min(check.deadline_s, ends_s - began_s))
        cause, remedy, figure = _run(name, check, replace(setting, folder=folder), variables, program)
        seconds = time.monotonic() - began_s
        measured = read_figures(folder)
        if cause is None:
            yield Outcome(name, True, figure, seconds, measured=measured)
        else:
            remedy = f"{remedy or check.remedy}; the log: {folder / LOG}"
            yield Outcome(name, False, figure, seconds, cause, remedy, measured)


def read_figures(folder: Path) -> list[dict[str, float | str]]:
    """Measurements that a check noted, see `Setting.note`."""
    file = folder / FIGURES
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _run(
    name: str, check: CheckSpec, setting: Setting, variables: Mapping[str, str], program: Sequence[str]
) -> tuple[str | None, str | None, str]:
    """(cause of a failure, its remedy if it has its own, figure)."""
    log, given = setting.folder / LOG, asdict(setting) | {"folder": str(setting.folder)}
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*program, name],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
            text=True,
        )
        try:
            process.communicate(json.dumps(given), timeout=check.deadline_s)
        except subprocess.TimeoutExpired:
            return f"it was not done after {check.deadline_s:.3g} s", None, ""
        finally:
            _end(process)
    said = setting.folder / OUTCOME
    if said.exists():
        outcome = json.loads(said.read_text(encoding="utf-8"))
        return outcome.get("cause"), outcome.get("remedy"), outcome.get("figure", "")
    return f"its process {_ending(process.returncode)}; {_last_line(log)}", None, ""


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the check's process and all that it left."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"its last line: {lines[-1]}" if lines else "it said nothing"
