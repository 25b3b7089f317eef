# SPDX-License-Identifier: Apache-2.0
"""Rows of a prompt file: parquet, JSON, JSON lines, comma- or tab-separated values, or text with one prompt per line.

A text file is UTF-8, with or without a byte order mark. Lines end with a line feed, a carriage return or both; other
separators of Unicode are part of a prompt.
"""

import codecs
import gzip
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_digen.data.tables import csv_rows, parquet_rows
from verl_digen.inputs.tables import HUB, HUB_NAME
from verl_digen.require import refusing, require, shown

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".txt")
"""Suffixes of prompt files, in any case."""
COMPRESSED = ".gz"
"""May follow a suffix, except parquet's, which compresses itself."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}


def kind_of(path: Path) -> str | None:
    """The one of `SUFFIXES` that says how to read a file; None for other files."""
    suffix, allowed = path.suffix.lower(), SUFFIXES
    if suffix == COMPRESSED:
        suffix, allowed = Path(path.stem).suffix.lower(), SUFFIXES[1:]
    return suffix if suffix in allowed else None


def rows_of(
    path: Path, key: str, kept: frozenset[str] = frozenset(), images: Sequence[str] = ()
) -> Iterator[tuple[str, str | dict[str, Any]]]:
    """(place, row) of every non-blank row; a place is such as "line 3 of 'train.jsonl'". A row that is a string is its
    prompt. `key`: the config key under which the path was typed; `kept`, `images`: columns of a table, see
    `rows_of_table`. ValueError: the file is not there, cannot be read, or is malformed."""
    name = repr(str(path))
    with readable(str(path), key):
        kind = _require_file(path, key)
        _require_content(path, key)
        numbered = parquet_rows(path, key, kept, images) if kind == ".parquet" else _text_rows(path, kind, key)
        for place, row in numbered:
            if not isinstance(row, str | dict):
                raise ValueError(
                    f'{key}: {place} of {name} must be a JSON object, got {shown(row)}; write {{"prompt": "..."}}'
                )
            yield f"{place} of {name}", row


@contextmanager
def readable(name: str, key: str) -> Iterator[None]:
    """Context that reads a file or folder, typed under `key`: an OSError is a ValueError in the form of `require`."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{key} must name files that can be read, got {name!r} ({error.strerror or error}); check the file and its "
            "permissions"
        ) from error


def _require_file(path: Path, key: str) -> str:
    """The file's kind."""
    kind = kind_of(path)
    is_on_hub = kind is None and not path.suffix and HUB_NAME.fullmatch(f"{HUB}{path}")
    remedy = f"check the path, or write {HUB}{path} for a dataset of the hub"
    require(not is_on_hub, f"{key} must name existing files", str(path), remedy)
    if kind is None:
        way = "pandas.read_excel(FILE).to_parquet(FILE.parquet)" if path.suffix.startswith(".xls") else "datasets"
        raise ValueError(
            f"{key} must name files ending in one of {', '.join(SUFFIXES)}, got {str(path)!r}; convert it, e.g. with "
            f"{way}"
        )
    if not path.is_file():
        where = (
            "prompts are read from this machine: fetch it first"
            if "://" in str(path) or ":/" in str(path)
            else f"check the path (it is relative to the working directory {Path.cwd()})"
        )
        raise ValueError(f"{key} must name an existing file, got {str(path)!r}; {where}")
    return kind


def _require_content(path: Path, key: str) -> None:
    """Refuse what a download may leave in place of a file."""
    with open(path, "rb") as file:
        start = file.read(200).removeprefix(codecs.BOM_UTF8).lstrip().lower()
    page = "download the file itself, e.g. the raw one"
    for mark, what, remedy in (
        (b"version https://git-lfs", "a pointer of Git LFS", "fetch the file itself with `git lfs pull`"),
        (b"<!doctype html", "a page of HTML", page),
        (b"<html", "a page of HTML", page),
        (b"<!--", "a page of HTML", page),
        (b"<?xml", "a page of XML", page),
        (b"404: not found", "a server's answer", page),
        *([(b'{"', "JSON and no lines of prompts", "name it .jsonl")] if kind_of(path) == ".txt" else []),
    ):
        if start.startswith(mark):
            raise ValueError(f"{key} must name files of prompts, got {str(path)!r}, which is {what}; {remedy}")


def _text_rows(path: Path, kind: str, key: str) -> Iterator[tuple[str, Any]]:
    text = decode(path, key)
    if kind == ".txt":
        yield from ((place, line.strip()) for place, line in _lines(text))
        return
    if kind in DELIMITERS:
        yield from csv_rows(text, DELIMITERS[kind], f"{key}: {str(path)!r}")
        return
    is_array = text.lstrip().startswith("[")
    if is_array or kind == ".json":
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


def decode(path: Path, key: str) -> str:
    """Text of a file, without its byte order mark. ValueError: it is not UTF-8."""
    content = path.read_bytes()
    if path.suffix.lower() == COMPRESSED:
        with refusing(f"{key} must be a readable gzip file", str(path), "compress it again"):
            content = gzip.decompress(content)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        encoding = "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
        raise ValueError(
            f"{key}: line {number} of {str(path)!r} must be UTF-8, got the byte 0x{content[error.start]:02x}; save the "
            f"file as UTF-8, e.g. with iconv -f {encoding} -t utf-8 {os.path.basename(path)}"
        ) from error


def _parse(text: str) -> Any:
    """The JSON value in `text`. ValueError where there is none."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
