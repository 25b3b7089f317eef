# SPDX-License-Identifier: Apache-2.0
"""Every docstring names its thing first, so that a reader can search for it; the planner's examples are true."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from verl_digen.schedulers.durations import MeasuredDurations
from verl_digen.schedulers.group_book import GroupBook
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.slots import SlotPool

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path
    for folder in ("verl_digen", "patches", "tests", "examples", ".ci")
    for path in (ROOT / folder).rglob("*.py")
    if not path.is_relative_to(ROOT / "verl_digen" / "patches")  # a link to patches/
)
FORBIDDEN = re.compile(
    r"(Of|What|Who|Whoever|Whose|Nobody|Nothing|Those|That|Where|Whether|Which|As|In|The same)\b(?!-)"
)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of modules, classes, functions, and below a name that is assigned."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for before, statement in zip([None, *body], body, strict=False) if isinstance(body, list) else ():
            is_first = before is None and isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            )
            if not (is_first or isinstance(before, ast.Assign | ast.AnnAssign)) or not isinstance(statement, ast.Expr):
                continue
            if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
                yield statement.lineno, statement.value.value


def test_a_docstring_begins_with_a_noun_phrase_or_an_imperative_verb():
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in FILES
        for line, text in docstrings(ast.parse(path.read_text()))
        if FORBIDDEN.match(text)
    ]
    assert len(FILES) > 400 and bad == [], "name the thing first: a noun phrase, or a verb that says what to do"


@pytest.mark.parametrize("machine", [BatchPlanner, GroupBook, MeasuredDurations, SlotPool])
def test_an_example_runs_and_ends_each_line_in_what_its_comment_says(machine: type):
    """A comment is a value, or one and `: ` before words; others are not compared."""
    _, _, code = re.split(r"^(Example.*:)$", inspect.getdoc(machine) or "", maxsplit=1, flags=re.MULTILINE)
    names = {**vars(sys.modules[machine.__module__]), "durations": MeasuredDurations()}
    num_compared = 0
    for line in textwrap.dedent(code).strip().splitlines():
        source, _, comment = map(str.strip, line.partition("  # "))
        name, _, value = source.rpartition(" = ")
        found = eval(value, names)
        names |= {name: found} if name else {}
        for said in (comment, comment.partition(": ")[0]):
            with suppress(SyntaxError, NameError, TypeError):
                expected = eval(said, names)
                num_compared += 1
                assert found == expected, line
                break
    assert num_compared > 0
