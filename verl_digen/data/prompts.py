# SPDX-License-Identifier: Apache-2.0
"""Read prompts from files (`verl_digen.data.files`), and interpret the columns of a row.

| column | means | else |
| --- | --- | --- |
| `prompt` | the text: a string, or verl's chat list, of which the last user message is taken | required |
| `negative_prompt` | its own negative prompt, in the same two forms | `digen.sampling.negative_prompt` |
| `data_source` | its source; validation is reported per source | see `default_source` |
| `reward_model.ground_truth` | the reference for reward functions | see `default_ground_truth` |
| `extra_info` | a mapping for reward functions | `{}` |
| any other | joins `extra_info`, e.g. GenEval's `tag`, `include`, `exclude` | - |

A bad row is a ValueError that names the key, the file, the line, the rule, the value and the remedy.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_digen.data.files import SUFFIXES, rows_of, shown
from verl_digen.types import PromptRow

COLUMNS = ("prompt", "negative_prompt", "data_source", "reward_model", "extra_info")
"""Columns with a meaning of their own; others join `extra_info`."""
SPLIT_WORDS = {"train", "training", "test", "val", "valid", "validation", "eval", "dev", "metadata"}
"""Words of a file's name that say nothing about the source of its prompts."""
UNREADABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that no tokenizer takes."""
QUOTED = re.compile(r'"([^"]+)"')


def read_prompts(files: Any, key: str = "data.train_files") -> list[PromptRow]:
    """All prompts of `files`, in order.

    Args:
        files: one path or several, of the kinds in `SUFFIXES`.
        key: the config key under which the paths were typed, for error messages.

    Raises:
        ValueError: a value that is no path; a missing, empty, unreadable or malformed file.
    """
    paths = [files] if isinstance(files, str) else files
    if not isinstance(paths, list | tuple) or not paths or not all(isinstance(path, str) and path for path in paths):
        raise ValueError(
            f"{key} must name a prompt file or a list of them, got {shown(files)}; give a path to one of "
            f"{', '.join(SUFFIXES)}"
        )
    return [prompt for path in paths for prompt in _read_file(Path(os.path.expanduser(path)), key)]


def default_source(path: Path) -> str:
    """The file's name, or its folder's if the name says only which part it is: "ocr" for ocr/train.txt."""
    words = re.split(r"[\W_]+", path.stem.lower())
    return path.absolute().parent.name or path.stem if SPLIT_WORDS.issuperset(words) else path.stem


def default_ground_truth(text: str, data_source: str) -> str:
    """The prompt itself; for OCR prompts, the quoted text that the picture should show, as flow_grpo has it."""
    quoted = QUOTED.search(text) if "ocr" in re.split(r"[\W_]+", data_source.lower()) else None
    return text if quoted is None else quoted[1]


def _read_file(path: Path, key: str) -> list[PromptRow]:
    prompts = [_to_prompt(row, path, f"{key}: {place}", place) for place, row in rows_of(path, key)]
    if not prompts:
        raise ValueError(f"{key} must name files with at least one prompt, but {str(path)!r} is empty; add prompts")
    return prompts


def _to_prompt(row: dict[str, Any], path: Path, where: str, place: str) -> PromptRow:
    if "prompt" not in row:
        raise ValueError(
            f"{where} must have a column 'prompt', got columns {shown(sorted(map(str, row)))}; rename the column that "
            "holds the text"
        )
    text = _text(row["prompt"])
    if text is None or not text.strip():
        raise ValueError(
            f"{where} must have a prompt that is a non-empty string or a chat with a user message, got "
            f"{shown(row['prompt'])}; fill it in or remove the row"
        )
    negative = _text(row.get("negative_prompt"))
    if negative is None and row.get("negative_prompt") is not None:
        raise ValueError(
            f"{where} must have a negative_prompt that is a string, got {shown(row['negative_prompt'])}; write a "
            "string, or leave the column out"
        )
    for name, value in (("prompt", text), ("negative_prompt", negative or "")):
        if UNREADABLE.search(value):
            raise ValueError(
                f"{where} must have a {name} without NUL characters and halves of surrogate pairs, got {shown(value)}; "
                "remove them, or save the file as UTF-8 if it is in another encoding"
            )
    source = row.get("data_source")
    if not (source is None or (isinstance(source, str) and source.strip())):
        raise ValueError(
            f"{where} must have a data_source that is a string, got {shown(source)}; write a name, or leave the column "
            "out"
        )
    source = source or default_source(path)
    truth = _mapping(row, "reward_model", where).get("ground_truth")
    extra_info = {name: value for name, value in row.items() if name not in COLUMNS}
    return PromptRow(
        text=text,
        data_source=source,
        ground_truth=default_ground_truth(text, source) if truth is None else truth,
        negative=negative,
        extra=extra_info | _mapping(row, "extra_info", where),
        place=place,
    )


def _mapping(row: Mapping[str, Any], column: str, where: str) -> dict[str, Any]:
    value = row.get(column)
    if not (value is None or isinstance(value, dict)):
        raise ValueError(
            f"{where} must have a {column} that is an object, got {shown(value)}; write an object of names and values, "
            "or leave the column out"
        )
    return value or {}


def _text(value: Any) -> str | None:
    """The text of a string, or of the last user message of a chat list; None where there is none."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    contents = [turn.get("content") for turn in value if isinstance(turn, dict) and turn.get("role") == "user"]
    content = contents[-1] if contents else None
    if isinstance(content, list):  # parts, as in a chat with several modalities
        is_text = [isinstance(part, dict) and isinstance(part.get("text"), str) for part in content]
        return "".join(part["text"] for part in content) if content and all(is_text) else None
    return content if isinstance(content, str) else None
