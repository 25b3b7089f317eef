# SPDX-License-Identifier: Apache-2.0
"""Operators that make a function wrong, on its syntax tree: an entry of the table outlives changes of the text.

| operator | the function then |
| --- | --- |
| `given(size="size - 1")` | works with another value of an argument |
| `result("0.5 * result")` | returns another value |
| `skip()` | does nothing |
| `accept()` | raises no error of its own, and requires nothing |
| `passes(clamps="True")` | calls another function with another value of this keyword |
| `drop("mark")` | lacks the statement that calls, sets or deletes `mark` |
| `swap("<", "<=")`, `swap("min", "max")` | has another operator, or another expression |

The first four act on the border of the function, and do not care how its body is written: prefer them.
An operator fits if there is exactly one place for it. Where there are several, a number says which, from 1.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import partial

Function = ast.FunctionDef | ast.AsyncFunctionDef
Operator = Callable[[Function], None]
Place = Callable[[ast.AST], object]
"""Puts another node in the place of one."""

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
SYMBOLS: dict[str, type[ast.AST]] = {
    **{"<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE, "==": ast.Eq, "!=": ast.NotEq},
    **{"is": ast.Is, "is not": ast.IsNot, "in": ast.In, "not in": ast.NotIn, "and": ast.And, "or": ast.Or},
    **{"+": ast.Add, "-": ast.Sub, "*": ast.Mult, "/": ast.Div, "//": ast.FloorDiv, "%": ast.Mod},
}


class Misplaced(ValueError):
    """There is no such function, or the operator does not fit it."""


def mutated(source: str, name: str, operator: Operator) -> str:
    """Source of a module with a fault in the function of this qualified name, or with these last parts of it.

    Raises:
        Misplaced: the fault cannot be made.
    """
    tree = ast.parse(source)
    sound = ast.unparse(tree)
    found = {path: node for path, node in _functions(tree) if f".{path}".endswith(f".{name}")}
    if len(found) != 1:
        raise Misplaced(f"{len(found)} functions have this name ({', '.join(found)})")
    operator(*found.values())
    wrong = ast.unparse(ast.fix_missing_locations(tree))
    if wrong == sound:
        raise Misplaced("the operator changes nothing")
    return wrong


# -- at the border ----------------------------------------------------------------------------------------
def given(**arguments: str) -> Operator:
    """Replace arguments by expressions, which may name all arguments."""

    def apply(function: Function) -> None:
        own = function.args
        names = {one.arg for one in (*own.posonlyargs, *own.args, *own.kwonlyargs)}
        if not arguments.keys() <= names:
            raise Misplaced(f"its arguments are {', '.join(sorted(names))}")
        function.body[:0] = ast.parse("\n".join(f"{name} = {value}" for name, value in arguments.items())).body

    return apply


def result(expression: str) -> Operator:
    """Return an expression of `result`, the old value."""

    def apply(function: Function) -> None:
        for put, node in list(_places(function, own=True)):
            if isinstance(node, ast.Return) and node.value is not None:
                kept = ast.Assign([ast.Name("result", ast.Store())], node.value)
                put(ast.If(ast.Constant(True), [kept, ast.Return(_expression(expression))], []))

    return apply


def skip() -> Operator:
    """Do nothing, and return None."""

    def apply(function: Function) -> None:
        if any(isinstance(node, ast.Yield | ast.YieldFrom) for _, node in _places(function, own=True)):
            raise Misplaced("it is a generator")
        function.body = [ast.Return(None)]

    return apply


def accept() -> Operator:
    """Drop all statements that raise a new error, or call `require`."""

    def apply(function: Function) -> None:
        for put, node in list(_places(function, own=True)):
            raises = isinstance(node, ast.Raise) and node.exc is not None
            if raises or (isinstance(node, ast.Expr) and "require" in _marks(node)):
                put(ast.Pass())

    return apply


# -- in the body ------------------------------------------------------------------------------------------
def passes(**keyword: str) -> Operator:
    """Call with another expression for a keyword argument."""
    ((name, expression),) = keyword.items()

    def apply(function: Function) -> None:
        found = [node for _, node in _places(function) if isinstance(node, ast.keyword) and node.arg == name]
        _chosen([partial(setattr, node, "value") for node in found], None)(_expression(expression))

    return apply


def drop(mark: str, number: int | None = None) -> Operator:
    """Drop the statement that calls `mark` (a function's name, or its last parts), sets it or deletes from it."""

    def apply(function: Function) -> None:
        _chosen([put for put, node in _places(function) if mark in _marks(node)], number)(ast.Pass())

    return apply


def swap(old: str, new: str, number: int | None = None) -> Operator:
    """Put another operator, or another expression, in place of one."""

    def apply(function: Function) -> None:
        if old in SYMBOLS:
            places = [put for put, node in _places(function) if type(node) is SYMBOLS[old]]
            _chosen(places, number)(SYMBOLS[new]())
        else:
            wanted = ast.dump(_expression(old))
            places = [put for put, node in _places(function) if ast.dump(node) == wanted]
            _chosen(places, number)(_expression(new))

    return apply


def _chosen(places: Sequence[Place], number: int | None) -> Place:
    if len(places) != 1 if number is None else not 1 <= number <= len(places):
        raise Misplaced(f"there are {len(places)} places for it")
    return places[(number or 1) - 1]


# -- trees ------------------------------------------------------------------------------------------------
def _functions(scope: ast.AST, path: str = "") -> Iterator[tuple[str, Function]]:
    """(qualified name, function); of several with one name, e.g. after overloads, the last one comes last."""
    for _, node in _places(scope, own=True):
        if isinstance(node, Function | ast.ClassDef):
            if isinstance(node, Function):
                yield f"{path}{node.name}", node
            yield from _functions(node, f"{path}{node.name}.")


def _places(parent: ast.AST, *, own: bool = False) -> Iterator[tuple[Place, ast.AST]]:
    """(place, node) of the nodes in a body, in the order of the text. `own`: not of those in nested functions."""
    for field, value in ast.iter_fields(parent):
        if isinstance(parent, Function) and field != "body":
            continue  # defaults, decorators and annotations
        places = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, node in places:
            if isinstance(node, ast.AST):
                yield partial(setattr, parent, field) if index is None else partial(value.__setitem__, index), node
                if not (own and isinstance(node, SCOPES)):
                    yield from _places(node, own=own)


def _marks(statement: ast.AST) -> set[str]:
    """Names that a simple statement calls (as `a.b.c`, `b.c` and `c`), sets, or deletes from; else none."""
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete):
        return set()
    calls = [ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)]
    called = {".".join(name.split(".")[first:]) for name in calls for first in range(name.count(".") + 1)}
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    flat = [one for target in targets if target for one in getattr(target, "elts", [target])]
    return called | {ast.unparse(one.value if isinstance(one, ast.Subscript) else one) for one in flat}


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
