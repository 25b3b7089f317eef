# SPDX-License-Identifier: Apache-2.0
"""Read prompt files: verl-style parquet, JSONL, or plain text with one prompt per line.

- `prompt` is the only required column: a string, or verl's chat list, of which the user's text is taken.
- `data_source` defaults to the file's name, `reward_model.ground_truth` to the prompt itself.
- A bad file is a ValueError that names the file, the line and the remedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUFFIXES = (".parquet", ".jsonl", ".json", ".txt")


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file."""

    text: str
    data_source: str
    ground_truth: Any
    """What the reward functions compare with; the prompt's text unless the row says otherwise."""
    negative: str | None = None
    """This prompt's own negative prompt, or None for `digen.sampling.negative_prompt`."""
    extra_info: dict[str, Any] = field(default_factory=dict)


def read_prompts(files: str | Sequence[str], key: str = "data.train_files") -> list[Prompt]:
    """All prompts of `files`, in order.

    Args:
        files: one path or several, of the kinds in `SUFFIXES`.
        key: the config key the paths were typed under, for error messages.

    Raises:
        ValueError: a missing, empty or malformed file.
    """
    paths = [files] if isinstance(files, str) else list(files)
    if not paths:
        raise ValueError(f"{key} must name at least one prompt file, got {files!r}; give a path to one of {SUFFIXES}")
    return [prompt for path in paths for prompt in _read_file(Path(path).expanduser(), key)]


def _read_file(path: Path, key: str) -> list[Prompt]:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{key} must name files ending in one of {', '.join(SUFFIXES)}, got {str(path)!r}; convert it")
    if not path.is_file():
        raise ValueError(
            f"{key} must name an existing file, got {str(path)!r}; check the path (it is relative to the "
            f"working directory {Path.cwd()})"
        )
    prompts = [_to_prompt(row, path, number, key) for number, row in _rows(path, key)]
    if not prompts:
        raise ValueError(f"{key} must name files with at least one prompt, but {str(path)!r} is empty; add prompts")
    return prompts


def _rows(path: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(1-based row or line number, row) of every non-blank row."""
    if path.suffix == ".parquet":
        import pyarrow.parquet  # a heavy import that text users do not need

        try:
            table = pyarrow.parquet.read_table(path)
        except Exception as error:
            raise ValueError(
                f"{key}: {str(path)!r} is not a readable parquet file ({error}); write it again"
            ) from error
        yield from enumerate(table.to_pylist(), start=1)
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            yield number, {"prompt": line.strip()}
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{key}: line {number} of {str(path)!r} is not JSON ({error}); one object per line"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(
                f'{key}: line {number} of {str(path)!r} must be a JSON object, got {row!r}; write {{"prompt": "..."}}'
            )
        yield number, row


def _to_prompt(row: dict[str, Any], path: Path, number: int, key: str) -> Prompt:
    if "prompt" not in row:
        raise ValueError(
            f"{key}: row {number} of {str(path)!r} must have a column 'prompt', got columns "
            f"{sorted(row)}; rename the column that holds the text"
        )
    text = _text(row["prompt"])
    if not text:
        raise ValueError(
            f"{key}: the prompt in row {number} of {str(path)!r} must be a non-empty string or a chat with "
            f"a user message, got {row['prompt']!r}; fill it in or remove the row"
        )
    reward_model = row.get("reward_model") or {}
    return Prompt(
        text=text,
        data_source=row.get("data_source") or path.stem,
        ground_truth=reward_model.get("ground_truth", text),
        negative=_text(row.get("negative_prompt")),
        extra_info=row.get("extra_info") or {},
    )


def _text(value: Any) -> str | None:
    """The text of a string prompt, or of the last user message of a chat list."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = [turn["content"] for turn in value if isinstance(turn, dict) and turn.get("role") == "user"]
        return texts[-1] if texts and isinstance(texts[-1], str) else None
    return None
