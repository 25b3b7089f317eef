# SPDX-License-Identifier: Apache-2.0
"""Text of a question: a template with {prompt}, {ground_truth} and {NAME} of the row's further columns.

Other braces are written twice, as in Python's format strings: `{{"score": 4}}`.
"""

from __future__ import annotations

from string import Formatter
from typing import Any

from verl_digen.require import require
from verl_digen.types import PromptRow

OWN_FIELDS = ("prompt", "ground_truth")


def fields_of(question: str, key: str) -> tuple[str, ...]:
    """Names in braces, in order.

    Args:
        key: what the user typed it under, for the message.

    Raises:
        ValueError: a brace without its counterpart, or with anything but a name in it.
    """
    remedy = 'write {prompt}, {ground_truth} or {a column of the row}, and any other brace twice, e.g. {{"score": 4}}'
    try:
        parts = [part[1:] for part in Formatter().parse(question) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"{key} must be a text with names in braces, got {question!r} ({error}); {remedy}") from error
    for name, spec, conversion in parts:
        is_name = str(name).isidentifier() and not spec and not conversion
        require(is_name, f"{key} must have nothing but names in braces", name, remedy)
    return tuple(str(name) for name, _, _ in parts)


def filled(question: str, row: PromptRow, key: str) -> str:
    """The question about one prompt.

    Raises:
        ValueError: the row lacks a column that the question names.

    Example:
        filled("Does it show {prompt}?", PromptRow("a cat", "test", None), "judge.question")  # 'Does it show a cat?'
    """
    values: dict[str, Any] = {**row.extra, "prompt": row.text, "ground_truth": row.ground_truth}
    for name in fields_of(question, key):
        require(
            name in values and values[name] is not None,
            f"{key} must name columns that every prompt has ({', '.join(sorted(map(str, values)))})",
            name,
            f"add it to the row{f' ({row.place})' if row.place else ''}, or take it out of the question",
        )
    return question.format_map(values)
