# SPDX-License-Identifier: Apache-2.0
"""The `digen` command. A subcommand is a module with `NAME`, `add_arguments` and `run`; its docstring is its help."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.metadata import version
from typing import Protocol

from verl_digen import doctor
from verl_digen.bench import command as bench
from verl_digen.observe.timeline import command as timeline
from verl_digen.plan import command as plan
from verl_digen.simulate import command as simulate


class Command(Protocol):
    """What a subcommand's module has. It imports heavy things inside `run`, so that the others start fast."""

    __doc__: str | None

    @property
    def NAME(self) -> str:
        """The word after `digen`."""
        ...

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare options and arguments."""
        ...

    def run(self, args: Namespace) -> int:
        """Do it; the result is the exit code."""
        ...


COMMANDS: tuple[Command, ...] = (doctor, timeline, simulate, bench, plan)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line (`sys.argv` unless given) and run the subcommand."""
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
        subparser.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    return args.run(args)
