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
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

import psutil

from verl_digen.tools.checkup.checks import CHECKS, FIGURES, CheckSpec, Setting, cause_of

LOG, OUTCOME, REPORT = "log.txt", "outcome.json", "report.md"
PROGRAM = (sys.executable, "-W", "ignore", "-m", "verl_digen.tools.checkup.runner")
"""A check's process: its name follows, its setting as JSON is stdin."""


@dataclass(frozen=True)
class Outcome:
    """Result of one check."""

    name: str
    passed: bool
    seconds: float
    figure: str = ""
    """Measurements as text; "" if it failed."""
    cause: str = ""
    """Why it failed; "" if it passed."""
    remedy: str = ""
    """Remedy; "" if it passed."""
    measured: Sequence[Mapping[str, float | str]] = ()
    """Measurements that the check noted, see `Setting.note`."""

    def __str__(self) -> str:
        """One line, one for each measurement, and for a failed check two more."""
        lines = [f"{'pass' if self.passed else 'FAIL'}  {self.name:<10} {self.seconds:6.1f} s  {self.figure}".rstrip()]
        for figures in self.measured:
            values = ", ".join(f"{name} {_shown(value)}" for name, value in figures.items() if name != "what")
            lines.append(f"      {figures['what']}: {values}")
        if not self.passed:
            lines += [f"      cause  {self.cause}", f"      remedy {self.remedy}"]
        return "\n".join(lines)


def _shown(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def to_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown table of all outcomes, for bug reports."""
    rows = [
        (
            one.name,
            "pass" if one.passed else "FAIL",
            f"{one.seconds:.1f}",
            one.figure if one.passed else one.cause.partition("\n")[0],
        )
        for one in outcomes
    ]
    lines = [("check", "result", "seconds", "figure or cause"), ("---",) * 4, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


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
        said = _run(name, check, replace(setting, folder=folder), variables, program)
        remedy = f"{check.remedy}; the log: {folder / LOG}" if "cause" in said else ""
        seconds, measured = time.monotonic() - began_s, read_figures(folder)
        yield Outcome(name, passed="cause" not in said, seconds=seconds, remedy=remedy, measured=measured, **said)


def read_figures(folder: Path) -> list[dict[str, float | str]]:
    """Measurements that a check noted, see `Setting.note`."""
    file = folder / FIGURES
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _run(
    name: str, check: CheckSpec, setting: Setting, variables: Mapping[str, str], program: Sequence[str]
) -> dict[str, str]:
    """`figure` of a check that passed, or `cause` of its failure."""
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
            return {"cause": f"it was not done after {check.deadline_s:.3g} s"}
        finally:
            _end(process)
    said = setting.folder / OUTCOME
    if said.exists():
        return json.loads(said.read_text(encoding="utf-8"))
    code = process.returncode
    ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return {"cause": f"its process {ending}; " + (f"its last line: {lines[-1]}" if lines else "it said nothing")}


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the check's process and all that it left."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report(names: Sequence[str], outcomes: Iterable[Outcome], out: Path | None = None) -> Sequence[Outcome]:
    """Print each outcome when it is known, then the table -> all outcomes.

    Args:
        names: of all checks that were asked for.
        out: folder that gets the same text and all figures, as they come.
    """

    def say(text: str) -> None:
        print(text, flush=True)
        if out is not None:
            with open(out / REPORT, "a", encoding="utf-8") as file:
                file.write(text + "\n")

    done = []
    for outcome in outcomes:
        say(str(outcome))
        done.append(outcome)
        if out is not None:
            with open(out / FIGURES, "a", encoding="utf-8") as file:
                file.writelines(json.dumps({"check": outcome.name, **one}) + "\n" for one in outcome.measured)
    say(f"\n{to_table(done)}\n")
    if left_out := [name for name in names if name not in {outcome.name for outcome in done}]:
        say(f"Left out for lack of time: {', '.join(left_out)}.")
    failed = [outcome.name for outcome in done if not outcome.passed]
    total_s = sum(outcome.seconds for outcome in done)
    say(f"{f'FAILED: {chr(44).join(failed)}' if failed else 'All checks passed'} ({total_s:.0f} s).")
    return done


def check_here(name: str, given: dict[str, object]) -> None:
    """Run a check in this process; its `outcome.json` gets {"figure": ...}, or {"cause": ...}."""
    setting = Setting(**(given | {"folder": Path(str(given["folder"]))}))  # type: ignore[arg-type]
    try:
        said = {"figure": CHECKS[name](setting)}
    except Exception as error:
        traceback.print_exc()
        said = {"cause": cause_of(error)}
    (setting.folder / OUTCOME).write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    check_here(sys.argv[1], json.load(sys.stdin))
