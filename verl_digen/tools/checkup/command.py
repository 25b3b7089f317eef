# SPDX-License-Identifier: Apache-2.0
"""Say whether a run could start on this machine, and what is missing: for a first look, and for bug reports.

With --selftest MODEL the numerics of one model are checked instead, on a tiny random checkpoint and in seconds:
its sampler against diffusers' own pipeline, log-probs of training against sampling, and a gradient step.

With --gpu the devices are checked with the parts of a run, in minutes: numerics in fp32 and bf16, attention's gradient,
the engine's gradient over NCCL, a weight update, sleep, three steps of the quick start. With --full they are measured
as well, on published sizes with random weights.

Exit code 0 if a run could start (or all checks hold), 1 if not, 2 for an unknown name.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import psutil

from verl_digen.models.tiny import BUILDERS
from verl_digen.observe.run_files import append_line
from verl_digen.require import require, require_one_of
from verl_digen.tools.checkup.checks import CHECKS, FIGURES, CheckSpec, Setting, cause_of
from verl_digen.tools.checkup.machine import examine, to_text

NAME = "doctor"

ARCHITECTURE = "qwen_image"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="the report as JSON, printed or written to FILE"
    )
    parser.add_argument("--selftest", metavar="MODEL", help="check one model, e.g. sd3; ? lists them")
    titles = "\n".join(f"{name:<10} {check.title}" for name, check in CHECKS.items())
    group = parser.add_argument_group("checks of the devices", titles)
    group.add_argument("--gpu", action="store_true", help="check what a run needs of them, in minutes")
    group.add_argument(
        "--full",
        action="store_true",
        help="measure as well: rates of the device, the quick start, published sizes with random weights, every "
        "architecture; about twenty minutes on one H100, in the folder of a checkout",
    )
    group.add_argument(
        "--budget",
        type=float,
        default=inf,
        metavar="SECONDS",
        help="time for all checks; what no longer fits is left out",
    )
    group.add_argument(
        "--only", action="append", default=[], metavar="CHECK", help="run this one, of --full too; repeatable"
    )
    group.add_argument(
        "--out", type=Path, metavar="FOLDER", help="keep report.md, figures.jsonl, logs and checkpoints in this folder"
    )
    group.add_argument("--device", choices=("cpu",), help="run the same checks on the CPU")
    group.add_argument(
        "--architecture", default=ARCHITECTURE, help="of the checks (default: %(default)s); ? lists them"
    )
    group.add_argument(
        "--skip", action="append", default=[], metavar="CHECK", help=f"leave one out: {', '.join(CHECKS)}; repeatable"
    )


def run(args: Namespace) -> int:
    if args.gpu:
        remedy = f"--only numerics --architecture {args.selftest} checks the same"
        require(args.selftest is None, "--selftest must be left out with --gpu", args.selftest, remedy)
        return check_devices(args)
    parser = ArgumentParser()
    add_arguments(parser)
    others = {name: value for name, value in vars(parser.parse_args([])).items() if name not in ("json", "selftest")}
    alone = [f"--{name}" for name, default in others.items() if getattr(args, name) != default]
    require(not alone, "--gpu must be given with the options of its checks", " ".join(alone), "add it")
    if args.selftest is not None:
        return selftest(args.selftest, args.json)
    found = examine()
    _write(args.json, asdict(found))
    if args.json != "-":
        print(to_text(found))
    return 1 if found.problems else 0


def _write(file: str | None, found: dict[str, Any]) -> None:
    """Write or print what `--json` asks for."""
    text = json.dumps(found, indent=2)
    if file == "-":
        print(text)
    elif file is not None:
        Path(file).write_text(text + "\n", encoding="utf-8")


def selftest(name: str, file: str | None) -> int:
    """Print a line per check of the tiny checkpoint `name`, or write them to `file`; returns the exit code."""
    require_one_of("--selftest", name, sorted(BUILDERS))  # before imports that take seconds
    from verl_digen.tools.checkup.selftest import run_selftest  # imports diffusers' pipelines

    checks = []
    try:
        for check in run_selftest(name):
            if file != "-":
                print(check, flush=True)
            checks.append(check)
    except ValueError:  # a fault of the model, not of the words
        traceback.print_exc()
        return 1
    _write(file, {"model": name, "checks": [{**asdict(check), "holds": check.holds} for check in checks]})
    return 0 if all(check.holds for check in checks) else 1


def check_devices(args: Namespace) -> int:
    """Exit code: 0 if all checks passed, 1 if one failed, none ran or there is no device. Raises ValueError for a bad
    option."""
    require_one_of("--architecture", args.architecture, sorted(BUILDERS))
    for option in ("skip", "only"):
        for name in getattr(args, option):
            require_one_of(f"--{option}", name, CHECKS)
    if args.json not in (None, "-"):
        parent = Path(args.json).absolute().parent
        require(parent.is_dir(), "--json must be in a folder that is there", args.json, "make it")
    found = find_devices(args.device)
    if found is None:
        return 1
    device, num_devices = found
    names = [name for name, check in CHECKS.items() if args.full or not check.is_full]
    names = [name for name in args.only or names if name not in args.skip]
    folder = Path(tempfile.mkdtemp(prefix="digen_doctor_")) if args.out is None else args.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(folder=folder, num_devices=num_devices, architecture=args.architecture, is_cpu=device == "cpu")
    print(f"{num_devices} x {device}; {len(names)} checks, logs in {folder}", flush=True)
    outcomes = report(names, run_checks(names, setting, budget_s=args.budget), args.out)
    _write(args.json, {"device": device, "num_devices": num_devices, "checks": list(map(asdict, outcomes))})
    if not outcomes or not all(outcome.passed for outcome in outcomes):
        return 1
    if args.out is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def find_devices(asked: str | None) -> tuple[str, int] | None:
    """(device, number) to check; None, after a line that says why, without an accelerator where the CPU is not
    `asked`."""
    if asked == "cpu":
        return "cpu", 1
    from verl.plugin.platform import get_platform  # takes seconds

    platform = get_platform()
    if platform.device_name != "cpu" and platform.is_available() and platform.device_count() > 0:
        return platform.device_name, platform.device_count()
    print(
        "digen doctor --gpu: this machine has no accelerator that PyTorch can use, so nothing was checked; `digen "
        "doctor` says what PyTorch found, and --device cpu runs the same checks on the CPU",
        file=sys.stderr,
    )
    return None


LOG, OUTCOME, REPORT = "log.txt", "outcome.json", "report.md"
PROGRAM = (sys.executable, "-W", "ignore", "-m", "verl_digen.tools.checkup.command")
"""A check's process: its name follows, its setting as JSON is stdin."""


@dataclass(frozen=True)
class Outcome:
    """Result of one check; `figure` is "" if it failed, `cause` and `remedy` are "" if it passed."""

    name: str
    passed: bool
    seconds: float
    figure: str = ""
    cause: str = ""
    remedy: str = ""
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
    names: Sequence[str], setting: Setting, *, budget_s: float = inf, program: Sequence[str] = PROGRAM
) -> Iterator[Outcome]:
    """Run the checks one after another, each in a process and a folder of its own and with a deadline; yields each
    outcome when it is known. A check is killed where `budget_s` ends, and one that no longer fits is left out.

    Invariants (tests/checkup/test_runner.py): a check that raises, dies or hangs is a failed outcome with a cause, and
    the checks after it run; no process of a check outlives it.
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
        said = _run(name, check, replace(setting, folder=folder), program)
        remedy = f"{check.remedy}; the log: {folder / LOG}" if "cause" in said else ""
        seconds, measured = time.monotonic() - began_s, read_figures(folder)
        yield Outcome(name, passed="cause" not in said, seconds=seconds, remedy=remedy, measured=measured, **said)


def read_figures(folder: Path) -> list[dict[str, float | str]]:
    """Measurements that a check noted, see `Setting.note`."""
    file = folder / FIGURES
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _run(name: str, check: CheckSpec, setting: Setting, program: Sequence[str]) -> dict[str, str]:
    """`figure` of a check that passed, or `cause` of its failure."""
    log, given = setting.folder / LOG, asdict(setting) | {"folder": str(setting.folder)}
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*program, name],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | ({"VERL_PLATFORM": "cpu"} if setting.is_cpu else {}),
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
    """Print each outcome when it is known, then the table; `out` gets the same text and all figures, as they come."""

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
            for one in outcome.measured:
                append_line(out / FIGURES, {"check": outcome.name, **one})
    say(f"\n{to_table(done)}\n")
    if left_out := [name for name in names if name not in {outcome.name for outcome in done}]:
        say(f"Left out for lack of time: {', '.join(left_out)}.")
    failed = [outcome.name for outcome in done if not outcome.passed]
    total_s = sum(outcome.seconds for outcome in done)
    passed = "All checks passed" if done else "NOTHING WAS CHECKED"
    say(f"{f'FAILED: {chr(44).join(failed)}' if failed else passed} ({total_s:.0f} s).")
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
