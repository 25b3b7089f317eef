# SPDX-License-Identifier: Apache-2.0
"""Rows of a prompt file: parquet, JSON, JSON lines, or plain text with one prompt per line.

- A text file is UTF-8, with or without a byte order mark. Lines end with a line feed, a carriage return or both; other
  separators of Unicode are part of a prompt.
- A `.json` or `.jsonl` file is an array of rows, one row, or one row per line. A row that is a string is its prompt.
- An error is a ValueError of one line: key, place, rule, value, remedy.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".parquet", ".jsonl", ".json", ".txt")
"""Suffixes of prompt files, in any case."""
MAX_CHARACTERS_SHOWN = 80
"""Longest value shown in an error, in characters."""


def rows_of(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of every non-blank row; a place is such as "line 3 of 'train.jsonl'".

    Args:
        key: the config key under which the path was typed.

    Raises:
        ValueError: the file is not there, cannot be read, or is malformed.
    """
    try:
        _require_file(path, key)
        numbered = _parquet_rows(path, key) if path.suffix.lower() == ".parquet" else _text_rows(path, key)
        for place, row in numbered:
            place = f"{place} of {str(path)!r}"
            row = {"prompt": row} if isinstance(row, str) else row
            if not isinstance(row, dict):
                raise ValueError(f'{key}: {place} must be a JSON object, got {shown(row)}; write {{"prompt": "..."}}')
            yield place, row
    except OSError as error:
        raise ValueError(
            f"{key} must name files that can be read, got {str(path)!r} ({error.strerror or error}); check the file "
            "and its permissions"
        ) from error


def shown(value: Any) -> str:
    """Format a value for a message: its start, if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_CHARACTERS_SHOWN else f"{text[:MAX_CHARACTERS_SHOWN]}..."


def _require_file(path: Path, key: str) -> None:
    if path.is_dir():
        files = sorted(str(file) for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
        inside = (
            f" of those in it, e.g. {key}={files[0]}" if files else f"; the folder has none of {', '.join(SUFFIXES)}"
        )
        raise ValueError(f"{key} must name files, got the folder {str(path)!r}; name one or several{inside}")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"{key} must name files ending in one of {', '.join(SUFFIXES)}, got {str(path)!r}; convert it, e.g. with "
            "pandas.read_csv(FILE).to_parquet(FILE.parquet)"
        )
    if not path.is_file():
        where = (
            "prompts are read from this machine: fetch it first"
            if "://" in str(path) or ":/" in str(path)
            else f"check the path (it is relative to the working directory {Path.cwd()})"
        )
        raise ValueError(f"{key} must name an existing file, got {str(path)!r}; {where}")


def _parquet_rows(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    import pyarrow.lib  # a heavy import that text users do not need
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError, pyarrow.lib.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{key}: {str(path)!r} is not a readable parquet file ({reason}); write it again") from error
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row


def _text_rows(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    text = _decode(path, key)
    if path.suffix.lower() == ".txt":
        yield from ((place, line.strip()) for place, line in _lines(text))
        return
    is_array = text.lstrip().startswith("[")
    if is_array or path.suffix.lower() == ".json":
        try:
            whole = _parse(text)
        except ValueError as error:
            if is_array:
                raise ValueError(
                    f"{key}: {str(path)!r} is not a JSON array ({error}); write an array of objects, or one object per "
                    "line"
                ) from error
        else:
            items = whole if isinstance(whole, list) else [whole]
            yield from ((f"item {number}", item) for number, item in enumerate(items, start=1))
            return
    for place, line in _lines(text):
        try:
            row = _parse(line)
        except ValueError as error:
            raise ValueError(
                f"{key}: {place} of {str(path)!r} is not JSON ({error}), got {shown(line)}; write one object per line"
            ) from error
        yield place, row


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """(place, line) of the lines that are not blank."""
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        if line.strip():
            yield f"line {number}", line.rstrip("\n")


def _decode(path: Path, key: str) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{key}: line {number} of {str(path)!r} must be UTF-8, got the byte 0x{content[error.start]:02x}; save the "
            f"file as UTF-8, e.g. with iconv -f latin1 -t utf-8 {os.path.basename(path)}"
        ) from error


def _parse(text: str) -> Any:
    """The JSON value in `text`. ValueError where there is none."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
