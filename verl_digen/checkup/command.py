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
from pathlib import Path

from verl_digen.checkup.outcome import Outcome, to_table
from verl_digen.checkup.registry import CHECKS
from verl_digen.checkup.setting import Setting
from verl_digen.models.tiny import BUILDERS
from verl_digen.require import require, require_one_of

ARCHITECTURE = "qwen_image"
UPDATE_MB = {"cpu": 128}
ASLEEP_MB = {"cpu": 256}
ACCELERATOR_MB = 4096
"""Sizes in MiB; on an accelerator large enough that its speed shows."""
CPU_VARIABLES = {"VERL_PLATFORM": "cpu"}


def add_arguments(parser: ArgumentParser) -> None:
    """Options that need `--gpu`."""
    titles = "\n".join(f"{name:<10} {check.title}" for name, check in CHECKS.items())
    group = parser.add_argument_group("checks of the devices", titles)
    group.add_argument("--gpu", action="store_true", help="check what a run needs of them, in about two minutes")
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
        for name in args.skip:
            require_one_of("digen doctor --skip", name, CHECKS)
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
    names = [name for name in CHECKS if name not in args.skip]
    folder = Path(tempfile.mkdtemp(prefix="digen_doctor_"))
    setting = Setting(
        folder=folder,
        num_devices=num_devices,
        architecture=args.architecture,
        update_mb=UPDATE_MB.get(device, ACCELERATOR_MB),
        asleep_mb=ASLEEP_MB.get(device, ACCELERATOR_MB),
    )
    from verl_digen.checkup.runner import run_checks  # needs psutil, and a wrong option is told without

    print(f"{num_devices} x {device}; {len(names)} checks, logs in {folder}", flush=True)
    outcomes = report(run_checks(names, setting, variables=CPU_VARIABLES if device == "cpu" else {}))
    if args.json is not None:
        text = json.dumps(
            {"device": device, "num_devices": num_devices, "checks": list(map(asdict, outcomes))}, indent=2
        )
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    if all(outcome.passed for outcome in outcomes):
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    return 1


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


def report(outcomes: Iterable[Outcome]) -> Sequence[Outcome]:
    """Print each outcome when it is known, then the table -> all outcomes."""
    done = []
    for outcome in outcomes:
        print(outcome, flush=True)
        done.append(outcome)
    print(f"\n{to_table(done)}\n")
    failed = [outcome.name for outcome in done if not outcome.passed]
    total_s = sum(outcome.seconds for outcome in done)
    print(f"{f'FAILED: {chr(44).join(failed)}' if failed else 'All checks passed'} ({total_s:.0f} s).", flush=True)
    return done
