# SPDX-License-Identifier: Apache-2.0
"""`digen doctor --gpu`: choose the device, run the checks, print a line each and a table."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path

from verl_digen.checkup.outcome import Outcome, to_table
from verl_digen.checkup.registry import CHECKS
from verl_digen.checkup.setting import FIGURES, Setting
from verl_digen.models.tiny import BUILDERS
from verl_digen.require import require, require_one_of

ARCHITECTURE = "qwen_image"
UPDATE_MB = {"cpu": 128}
ASLEEP_MB = {"cpu": 256}
ACCELERATOR_MB = 4096
"""Sizes in MiB; on an accelerator large enough that its speed shows."""
REPORT = "report.md"
CPU_VARIABLES = {"VERL_PLATFORM": "cpu"}


def add_arguments(parser: ArgumentParser) -> None:
    """Options that need `--gpu`."""
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
    """Exit code: 0 if all checks passed, 1 if one failed or there is no device, 2 for a bad option."""
    try:
        require_one_of("digen doctor --architecture", args.architecture, sorted(BUILDERS))
        for option in ("skip", "only"):
            for name in getattr(args, option):
                require_one_of(f"digen doctor --{option}", name, CHECKS)
        if args.json not in (None, "-"):
            parent = Path(args.json).absolute().parent
            require(parent.is_dir(), "digen doctor --json must be in a folder that is there", args.json, "make it")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    found = find_devices(args.device)
    if found is None:
        return 1
    device, num_devices = found
    names = [name for name, check in CHECKS.items() if args.full or not check.is_full]
    names = [name for name in args.only or names if name not in args.skip]
    folder = Path(tempfile.mkdtemp(prefix="digen_doctor_")) if args.out is None else args.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        folder=folder,
        num_devices=num_devices,
        architecture=args.architecture,
        update_mb=UPDATE_MB.get(device, ACCELERATOR_MB),
        asleep_mb=ASLEEP_MB.get(device, ACCELERATOR_MB),
        is_cpu=device == "cpu",
    )
    from verl_digen.checkup.runner import run_checks  # needs psutil, and a wrong option is told without

    print(f"{num_devices} x {device}; {len(names)} checks, logs in {folder}", flush=True)
    variables = CPU_VARIABLES if device == "cpu" else {}
    outcomes = report(names, run_checks(names, setting, variables=variables, budget_s=args.budget), args.out)
    if args.json is not None:
        text = json.dumps(
            {"device": device, "num_devices": num_devices, "checks": list(map(asdict, outcomes))}, indent=2
        )
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    if not all(outcome.passed for outcome in outcomes):
        return 1
    if args.out is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def find_devices(asked: str | None) -> tuple[str, int] | None:
    """(device, number) to check; None, after a line that says why, if there is no accelerator and the CPU was not
    asked for."""
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
