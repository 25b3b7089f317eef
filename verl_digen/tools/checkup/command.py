# SPDX-License-Identifier: Apache-2.0
"""Say whether a run could start on this machine, and what is missing: for a first look, and for bug reports.

With --selftest MODEL the numerics of one model are checked instead, on a tiny random checkpoint and in seconds:
its sampler against diffusers' own pipeline, log-probs of training against sampling, and a gradient step.

With --gpu the devices are checked with the parts of a run, in minutes: numerics in fp32 and bf16, attention's gradient,
the engine's gradient over NCCL, a weight update, sleep, three steps of the quick start. With --full they are measured
as well, on published sizes with random weights.

Exit code 0 if a run could start (or all checks hold), 1 if not, 2 for an unknown name.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from verl_digen.models.tiny import BUILDERS
from verl_digen.require import require, require_one_of
from verl_digen.tools.checkup import runner
from verl_digen.tools.checkup.checks import CHECKS, Setting
from verl_digen.tools.checkup.machine import examine, to_text

NAME = "doctor"

ARCHITECTURE = "qwen_image"
UPDATE_MB = {"cpu": 128}
ASLEEP_MB = {"cpu": 256}
ACCELERATOR_MB = 4096
"""Sizes in MiB; on an accelerator large enough that its speed shows."""
CPU_VARIABLES = {"VERL_PLATFORM": "cpu"}


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
    if args.selftest is not None:
        return selftest(args.selftest)
    if args.gpu:
        return check_devices(args)
    report = examine()
    _write(args.json, asdict(report))
    if args.json != "-":
        print(to_text(report))
    return 1 if report.problems else 0


def _write(file: str | None, found: dict[str, Any]) -> None:
    """Write or print what `--json` asks for."""
    text = json.dumps(found, indent=2)
    if file == "-":
        print(text)
    elif file is not None:
        Path(file).write_text(text + "\n", encoding="utf-8")


def selftest(name: str) -> int:
    """Print a line per check of the tiny checkpoint `name`; returns the exit code."""
    try:  # before imports that take seconds
        require_one_of("digen doctor --selftest", name, sorted(BUILDERS))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    from verl_digen.tools.checkup.selftest import run_selftest  # imports diffusers' pipelines

    checks = []
    for check in run_selftest(name):
        print(check, flush=True)
        checks.append(check)
    return 0 if all(check.holds for check in checks) else 1


def check_devices(args: Namespace) -> int:
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
    print(f"{num_devices} x {device}; {len(names)} checks, logs in {folder}", flush=True)
    variables = CPU_VARIABLES if device == "cpu" else {}
    running = runner.run_checks(names, setting, variables=variables, budget_s=args.budget)
    outcomes = runner.report(names, running, args.out)
    _write(args.json, {"device": device, "num_devices": num_devices, "checks": list(map(asdict, outcomes))})
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
