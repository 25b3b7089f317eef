# SPDX-License-Identifier: Apache-2.0
"""Prompts of the files to score.

| given | the prompt of a file |
| --- | --- |
| `--prompt TEXT` | this text, for all |
| `--prompts FILE` with a column `file_name` | the row that names it: its path, or the end of it |
| `--prompts FILE` without | the row at its place; with n files per row, rows repeat n times |
| neither | the text file beside it, NAME.txt; or a prompt file `metadata.*` in its folder, by `file_name` |

Columns mean what they mean in a run (`verl_digen.data.prompts`): ground truth, source, further columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verl_digen.data.files import SUFFIXES
from verl_digen.data.prompts import default_ground_truth, read_prompts
from verl_digen.require import require
from verl_digen.types import PromptRow

FILE_NAME = "file_name"
"""Column that names a row's file, as in image folders of the `datasets` library."""
SOURCE = "scored"
"""Data source of prompts that are given as a text."""


def prompts_of(files: Sequence[Path], *, prompt: str | None, prompt_file: str | None) -> list[PromptRow]:
    """One row per file; files of equal prompts share `uid`, as the samples of a group do.

    Raises:
        ValueError: a file has no prompt, a row names no file, or the numbers of both do not agree.
    """
    require(prompt is None or prompt_file is None, "--prompt and --prompts exclude each other", prompt, "give one")
    if prompt is not None:
        rows = [_of_text(prompt)] * len(files)
    elif prompt_file is not None:
        rows = _from_file(files, prompt_file, "--prompts")
    else:
        rows = _beside(files)
    return [replace(row, uid=row.text, index=index) for index, row in enumerate(rows)]


def _of_text(text: str) -> PromptRow:
    return PromptRow(text, SOURCE, default_ground_truth(text, SOURCE))


def _from_file(files: Sequence[Path], prompt_file: str, key: str) -> list[PromptRow]:
    rows = read_prompts(prompt_file, key)
    named = [row for row in rows if FILE_NAME in row.extra]
    if not named:
        require(
            len(files) % len(rows) == 0,
            f"{key} must have one row per file, or a row per n of them, for {len(files)} files",
            f"{len(rows)} rows",
            f"add a column {FILE_NAME} that names each row's file",
        )
        each = len(files) // len(rows)
        return [row for row in rows for _ in range(each)]
    if len(named) < len(rows):
        bare = next(row for row in rows if FILE_NAME not in row.extra)
        raise ValueError(f"{key}: {bare.place} must have a {FILE_NAME}, as others of the file have; fill it in")
    by_name = {Path(str(row.extra[FILE_NAME])).parts: row for row in rows}
    return [_row_of(file, by_name, f"{key} {prompt_file}") for file in files]


def _row_of(file: Path, by_name: dict[tuple[str, ...], PromptRow], where: str) -> PromptRow:
    """The row with the longest name that the file's path ends in."""
    for start in range(len(file.parts)):
        row = by_name.get(file.parts[start:])
        if row is not None:
            return row
    raise ValueError(f"{where} must have a row for every file, none has {FILE_NAME} {file.name!r}; add it")


def _beside(files: Sequence[Path]) -> list[PromptRow]:
    folders = {file.parent for file in files}
    tables = {folder: table for folder in folders if (table := _table(folder)) is not None}
    rows = []
    for file in files:
        text = file.with_suffix(".txt")
        if text.is_file():
            rows.append(_of_text(text.read_text(encoding="utf-8").strip()))
        elif file.parent in tables:
            (row,) = _from_file([file], str(tables[file.parent]), "the prompts of")
            rows.append(row)
        else:
            raise ValueError(
                f"{str(file)!r} must have a prompt: there is no {text.name} beside it, and no metadata.jsonl in its "
                "folder; give --prompts FILE, or --prompt TEXT (--prompt '' where the reward does not read it)"
            )
    return rows


def _table(folder: Path) -> Path | None:
    """The prompts of a folder's files; beside the folder for pictures of a run's validation."""
    paths = [folder / f"metadata{suffix}" for suffix in SUFFIXES if suffix != ".txt"]
    return next((path for path in (*paths, folder.with_suffix(".json")) if path.is_file()), None)
