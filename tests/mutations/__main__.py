# SPDX-License-Identifier: Apache-2.0
"""Make each mutation of the table in a copy of the tree, and run its tests there.

    python -m tests.mutations [-k WORDS] [-j NUMBER] [--list]

The working tree is never touched. The tests of each file are run on the unchanged copy first: a test that fails anyway
catches nothing. Exit status 1 if a mutation survives, if it cannot be made, or if its tests cannot be run.

Each run of tests is a fork of this process, which has imported the heavy libraries already.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.mutations.operators import Misplaced
from tests.mutations.table import LONG, TABLE, Mutation

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
"""Timeout of a run of tests; a mutation whose tests hang counts as caught."""
OUTCOMES = {0: "SURVIVED", 1: "caught", -1: "caught: no end"}
"""pytest's exit status -> outcome of a mutation. Any other: the tests could not be run."""


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-k", default="", metavar="WORDS", help="only mutations whose line of --list has WORDS")
    parser.add_argument("-j", type=int, default=2, metavar="NUMBER", help="runs of tests side by side (2)")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    options = parser.parse_args(arguments)
    chosen = [mutation for mutation in TABLE if options.k in str(mutation)]
    problems = [f"{mutation}: {problem}" for mutation in chosen if (problem := problem_of(mutation))]
    for line in (*(chosen if options.list else ()), *problems):
        print(line, flush=True)
    if problems or options.list:
        return int(bool(problems))
    import_heavy_libraries()
    with tempfile.TemporaryDirectory(prefix="digen_mutations_") as folder:
        copies = [Path(folder) / str(number) for number in range(options.j)]
        for copy in copies:
            copy_tree(copy)
        if side_by_side(copies, passes_unchanged, list(tests_of(chosen).items())):
            return 1
        num_bad = side_by_side(copies, is_caught, list(enumerate(chosen, start=1)))
    print(f"{len(chosen) - num_bad} of {len(chosen)} mutations are caught")
    return int(num_bad > 0)


def problem_of(mutation: Mutation) -> str:
    """Why the mutation cannot be made or noticed, or ""."""
    try:
        mutation.make(ROOT)
    except Misplaced as error:
        return str(error)
    return "" if (ROOT / "tests" / mutation.tests).is_file() else f"there is no tests/{mutation.tests}"


def tests_of(mutations: Sequence[Mutation]) -> dict[str, str]:
    """File -> the words that choose all tests of it that any mutation runs."""
    found: dict[str, list[str]] = {}
    for mutation in mutations:
        found.setdefault(mutation.tests, []).append(mutation.words)
    return {file: " or ".join(f"({one})" for one in set(words)) if all(words) else "" for file, words in found.items()}


def passes_unchanged(copy: Path, tests: tuple[str, str]) -> bool:
    """True if tests pass on the unchanged copy."""
    status, output = run_tests(copy, *tests)
    if status != 0:
        print(f"{output}\ntests/{tests[0]} must pass on the unchanged tree, and pytest ended with {status}", flush=True)
    return status == 0


def is_caught(copy: Path, numbered: tuple[int, Mutation]) -> bool:
    """True if a test goes red; prints a line of the table."""
    number, mutation = numbered
    file, wrong = mutation.make(copy)
    sound, began_s = file.read_text(), time.monotonic()
    file.write_text(wrong)
    status, output = run_tests(copy, mutation.tests, mutation.words)
    file.write_text(sound)
    outcome, seconds = OUTCOMES.get(status, f"NOT RUN (pytest ended with {status})"), time.monotonic() - began_s
    caught = outcome.startswith("caught")
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", output, re.MULTILINE) if caught else None
    print(f"{number:>3} {outcome:<9}{seconds:>4.0f} s  {mutation}  {found[1] if found else ''}", flush=True)
    return caught


# -- processes --------------------------------------------------------------------------------------------
def side_by_side(copies: Sequence[Path], check: Callable[[Path, Any], bool], items: Sequence[Any]) -> int:
    """Check items in as many processes as there are copies; returns how many are false."""
    workers = []
    for number, copy in enumerate(copies):
        workers.append(os.fork())
        if workers[-1] == 0:
            try:
                os._exit(sum(not check(copy, item) for item in items[number :: len(copies)]))
            except BaseException:
                traceback.print_exc()
                os._exit(len(items))
    return sum(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers)


def copy_tree(copy: Path) -> None:
    """Copy the files that git knows, as they are in the working tree."""
    words = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.exists():  # deleted and not committed
            shutil.copy2(source, target)


def import_heavy_libraries() -> None:
    """Import modules that every child needs; none of this project, whose code is the copy's there."""
    import datasets  # noqa: F401
    import diffusers  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import ray  # noqa: F401
    import tensordict  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    assert "verl_digen" not in sys.modules


def run_tests(copy: Path, file: str, words: str) -> tuple[int, str]:
    """Run pytest in a fork of this process, in the copy: (its exit status, or -1 at the timeout; its output)."""
    log = copy.with_suffix(".log")
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(log, "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            run_pytest(copy, file, words)
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < deadline_s:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                child = 0
                return (os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1), log.read_text()
            time.sleep(0.02)
        return -1, log.read_text()
    finally:
        if child:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def run_pytest(copy: Path, file: str, words: str) -> None:
    """Run pytest in this process, and end it."""
    import pytest

    os.chdir(copy)
    sys.path.insert(0, str(copy))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # those of the working tree
    # seconds apart and of one size, two mutations of a file would share its bytecode
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    marks = "not gpu" if file in LONG else "not (e2e or gpu or long)"
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", marks, "-k", words]
    status = int(pytest.main([*options, f"tests/{file}"]))
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
