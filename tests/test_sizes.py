# SPDX-License-Identifier: Apache-2.0
"""Upper bounds of the package's files and functions: what does not fit is split where a second reason begins."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from verl_digen.algorithms.objectives import find_objective, objective_names

PACKAGE = Path(__file__).resolve().parents[1] / "verl_digen"

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
"""Lines of code: blank lines, comments and docstrings do not count, nested functions do."""

MAX_OBJECTIVE_LINES = 149
"""Lines of the file of an objective: under 150, all counted."""

NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT),
    *(tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING),
}


def sources() -> list[tuple[str, str]]:
    """(path in the package, text) of its files; the links to recipes and patches are left out."""
    files = (path for path in PACKAGE.rglob("*.py") if not any(part.is_symlink() for part in path.parents))
    return [(path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in sorted(files)]


def functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines of code) of every function."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        is_documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_documented and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, len(lines.intersection(range(node.lineno, (node.end_lineno or 0) + 1)))


def test_no_file_is_longer_than_the_bound():
    longer = {path: text.count("\n") for path, text in sources() if text.count("\n") > MAX_FILE_LINES}
    assert not longer, f"split where a second reason to change begins: {longer}"


def test_no_function_is_longer_than_the_bound():
    longer = {
        (path, name): size for path, text in sources() for name, size in functions(text) if size > MAX_FUNCTION_LINES
    }
    assert not longer, f"give parts of it names: {longer}"


def test_an_objective_is_one_short_file():
    """Files that register none are parts that objectives share."""
    texts = {path: text for path, text in sources() if path.startswith("algorithms/objectives/")}
    names = {path: objectives_of(text) for path, text in texts.items()}
    found = [name for own in names.values() for name in own]
    package = [name for name in objective_names() if find_objective(name).compute.__module__.startswith("verl_digen.")]
    assert sorted(found) == sorted(package)
    longer = {path: texts[path].count("\n") for path in texts if names[path]}
    longer = {path: size for path, size in longer.items() if size > MAX_OBJECTIVE_LINES}
    assert not longer, f"move what other objectives could use to a file of its own: {longer}"


def objectives_of(text: str) -> list[str]:
    """Names that a file registers, by decorators or by calls."""
    calls = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "register_objective"
    ]
    return [ast.literal_eval(name) for call in calls for name in call.args]
