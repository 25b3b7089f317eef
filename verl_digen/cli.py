# SPDX-License-Identifier: Apache-2.0
"""The `digen` command. A subcommand is a module whose docstring is its help:

    NAME                             the word after `digen`
    add_arguments(ArgumentParser)    declares its arguments
    run(Namespace) -> int            carries it out -> exit code; ValueError where its words cannot be

Heavy imports go inside `run`, so that other subcommands start fast.
"""

import argparse
import atexit
import gc
import logging
import os
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType
from typing import NoReturn

from verl_digen.observe.timeline import command as timeline
from verl_digen.report import report_command as report
from verl_digen.require import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_TERMINATED
from verl_digen.tools import bench
from verl_digen.tools.checkup import command as doctor
from verl_digen.tools.export import export_command as export
from verl_digen.tools.export import sample_command as sample
from verl_digen.tools.plan import command as plan
from verl_digen.tools.score import score_command as score
from verl_digen.tools.simulate import command as simulate
from verl_digen.tools.train import train_command as train
from verl_digen.tools.train.launcher import handled
from verl_digen.tools.watch import command as watch
from verl_digen.user_modules import import_user_modules

COMMANDS: tuple[ModuleType, ...] = (
    *(train, watch, report, sample, export),
    *(doctor, plan, score, simulate, timeline, bench),
)


def make_parser() -> ArgumentParser:
    """Parser of the whole command line; the namespace it returns has `command` and `function`."""
    parser = ArgumentParser(prog="digen", description="Tools for runs of verl-digen.")
    parser.add_argument("--version", action="version", version=f"verl-digen {version('verl-digen')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        text = command.__doc__ or ""
        subparser = subparsers.add_parser(
            command.NAME,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(function=command.run)
    return parser


class Terminated(KeyboardInterrupt):
    """SIGTERM. A subcommand ends as on Ctrl-C, and so do the processes that it started."""


def _stop(number: int) -> NoReturn:
    raise Terminated


def _collect_rarely() -> None:
    """Search for garbage cycles less often than Python does, and not at exit: it took a third of the CPU time of `digen
    plan`, in the millions of objects that imports of torch and diffusers make, which stay."""
    gc.set_threshold(50_000, 20, 100)
    atexit.register(gc.freeze)


def _without_torchvision_notes() -> None:
    """Leave out transformers' notes that it prepares images without torchvision, which nothing here needs."""
    notes = logging.getLogger("transformers.utils.import_utils")
    notes.addFilter(lambda record: "requires torchvision (not installed)" not in record.getMessage())


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line (`sys.argv` unless given) and run the subcommand."""
    if argv is None:
        _collect_rarely()
        _without_torchvision_notes()
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr] # a console without the letter prints ?
    args = make_parser().parse_args(argv)
    try:
        import_user_modules()
        with handled(_stop, [signal.SIGTERM]):
            code = args.function(args)
        sys.stdout.flush()  # raises here if the reader closed the pipe, not while Python exits
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to print has no reader
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt as stopped:
        print(f"digen {args.command}: interrupted", file=sys.stderr)
        return EXIT_TERMINATED if isinstance(stopped, Terminated) else EXIT_INTERRUPTED
    except (ValueError, OSError) as error:  # rule, value and remedy; a named file or folder cannot be read or written
        remedy = "; name another file or folder" if isinstance(error, OSError) else ""
        print(f"digen {args.command}: {error}{remedy}", file=sys.stderr)
        return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())
