# SPDX-License-Identifier: Apache-2.0
"""Write a run's report, or a comparison of several runs: one HTML file that needs no network.

    digen report outputs/digen/quickstart
    digen report outputs/digen/quickstart --out /tmp/quickstart.html
    digen report outputs/digen/sd3-lr1e-4 outputs/digen/sd3-lr3e-4

RUN is a run's folder, its trainer.default_local_dir. A report has curves, pictures, timeline, config and warnings; a
run keeps RUN/report.html up to date by itself, unless digen.report=false. A comparison lays rewards over each other,
lists the differences of the configs, and shows the same prompts; it is comparison.html in the current folder.

Exit code 0, or 2 if nothing could be written.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from verl_digen.observe.run_files import REPORT, replace_text
from verl_digen.require import require

NAME = "report"
COMPARISON = "comparison.html"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder (trainer.default_local_dir)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"RUN/{REPORT} without it, of several {COMPARISON}")


def run(args: Namespace) -> int:
    """Write and say where."""
    from verl_digen.report.comparison import compare, named  # these import numpy and Pillow
    from verl_digen.report.page import render, write_report

    default = args.runs[0] / REPORT if len(args.runs) == 1 else Path(COMPARISON)
    path = default if args.out is None else args.out
    if args.out is not None:
        fits = not path.is_dir() and path.absolute().parent.is_dir()
        require(fits, "--out must be a file in a folder that is there", str(path), "name another file")
    if len(args.runs) == 1:
        write_report(args.runs[0], path)
    else:
        replace_text(path, render(compare(named(args.runs)), "comparison"))
    print(path)
    return 0
