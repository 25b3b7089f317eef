# SPDX-License-Identifier: Apache-2.0
"""Scores of files as a table or as JSON. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_digen.config import RewardEntry

MAX_PROMPT = 40
"""Longest prompt shown, in characters."""


@dataclass(frozen=True)
class Line:
    """One file's scores."""

    file: str
    prompt: str
    parts: Mapping[str, float]
    """Value of each reward, and details as `name/detail`."""
    errors: Mapping[str, str]
    """Rewards that failed, or `file` where it cannot be read."""
    total: float | None
    """Weighted sum; None if a reward failed."""


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation, least and greatest value of n numbers; None of none."""

    num: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None


def summary_of(values: Sequence[float]) -> Summary:
    """Summary with the deviation of a population: divided by n."""
    if not values:
        return Summary(0, None, None, None, None)
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return Summary(len(values), mean, std, min(values), max(values))


def as_json(lines: Sequence[Line], entries: Sequence[RewardEntry]) -> str:
    """One document: `files` in order, `summary` per reward, `num_failed`."""
    document = {
        "files": [
            {"file": line.file, "prompt": line.prompt, "scores": line.parts, "total": line.total}
            | ({"errors": line.errors} if line.errors else {})
            for line in lines
        ],
        "summary": {name: vars(summary) for name, summary in _summaries(lines, entries).items()},
        "num_failed": sum(1 for line in lines if line.errors),
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def as_table(lines: Sequence[Line], entries: Sequence[RewardEntry]) -> str:
    """A row per file, then mean and standard deviation per reward; failures below, with their reasons."""
    names = [entry.name for entry in entries]
    with_total = _has_total(entries)
    head = ["file", *names, *(["total"] if with_total else []), "prompt"]
    body = [
        [
            line.file,
            *(_number(line.parts.get(name), "failed") for name in names),
            *([_number(line.total, "-")] if with_total else []),
            _short(line.prompt),
        ]
        for line in lines
    ]
    summaries = list(_summaries(lines, entries).values())
    feet = [
        [word, *(_number(getattr(summary, word), "-") for summary in summaries), ""]
        for word in (("mean", "std") if len(lines) > 1 else ())
    ]
    text = _aligned([head, *body, *feet])
    failures = [f"{line.file}: {reward}: {reason}" for line in lines for reward, reason in line.errors.items()]
    num_failed = sum(1 for line in lines if line.errors)
    said = [f"{num_failed} of {len(lines)} files have no score:", *failures] if failures else []
    return "\n".join([*text, *said])


def _summaries(lines: Sequence[Line], entries: Sequence[RewardEntry]) -> dict[str, Summary]:
    columns = {entry.name: [line.parts[entry.name] for line in lines if entry.name in line.parts] for entry in entries}
    if _has_total(entries):
        columns["total"] = [line.total for line in lines if line.total is not None]
    return {name: summary_of(values) for name, values in columns.items()}


def _has_total(entries: Sequence[RewardEntry]) -> bool:
    """True if the weighted sum says more than the one reward."""
    return len(entries) > 1 or entries[0].weight != 1.0


def _number(value: float | None, missing: str) -> str:
    return missing if value is None else f"{value:.4f}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_PROMPT else f"{line[: MAX_PROMPT - 3]}..."


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns with equal widths: the first and the last to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
