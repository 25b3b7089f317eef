# SPDX-License-Identifier: Apache-2.0
"""Write a run's report: one HTML file with its curves, pictures, timeline, config and warnings.

    digen report outputs/digen/quickstart
    digen report outputs/digen/quickstart --out /tmp/quickstart.html

RUN is a run's folder, its trainer.default_local_dir. A run keeps RUN/report.html up to date by itself, unless
digen.report=false. The file needs no network and is smaller than 10 MB.

Exit code 0, or 2 if nothing could be written.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from verl_digen.observe.run_files import REPORT
from verl_digen.report.page import write_report
from verl_digen.require import require

NAME = "report"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare options and arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder (trainer.default_local_dir)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"RUN/{REPORT} without it")


def run(args: Namespace) -> int:
    """Write and say where."""
    path = args.run_dir / REPORT if args.out is None else args.out
    try:
        if args.out is not None:
            fits = not path.is_dir() and path.absolute().parent.is_dir()
            require(fits, "--out must be a file in a folder that is there", str(path), "name another file")
        write_report(args.run_dir, path)
    except (OSError, ValueError) as error:
        print(f"digen report: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0
