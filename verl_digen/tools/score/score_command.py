# SPDX-License-Identifier: Apache-2.0
"""Score pictures and videos with any reward, from the shell.

    digen score jpeg_compressibility out/ --prompt ''
    digen score ocr out/ --prompts test.txt
    digen score ocr RUN/images/step_000040
    digen score '{ocr: 1.0, pickscore: {weight: 0.5, path: ~/PickScore_v1}}' a.png b.png --prompt 'a sign "CAT"' --json

A reward is a name, several names with commas, FILE.py:NAME, or a mapping as in digen.reward.functions. A prompt comes
from --prompt, --prompts, a text file beside the picture (NAME.txt), metadata.jsonl in its folder (columns file_name and
prompt), or the run whose validation it is of. Progress goes to stderr, results to stdout.

Exit code 0 if every file has a score, 1 if one has none (the reason is printed), 2 if nothing can be scored.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_digen.config import RewardEntry
    from verl_digen.tools.score.rewards import LocalRewards, Scored
    from verl_digen.types import PromptRow, RewardInput

NAME = "score"
CHUNK_BYTES = 256 * 2**20
"""Pixels in memory at once, unless one file or group has more."""
MAX_PROMPT = 40
"""Longest prompt shown, in characters."""


@dataclass(frozen=True)
class Line:
    """One file's scores."""

    file: str
    prompt: str
    scored: Scored
    """A file that cannot be read has one error, `file`."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("reward", metavar="REWARD", help="name(s), FILE.py:NAME, or {name: {weight: 1.0, ...}}")
    parser.add_argument("files", nargs="+", metavar="FILE", help="pictures, videos, .npy arrays, or folders of them")
    parser.add_argument("--prompt", help="the prompt of all files")
    parser.add_argument("--prompts", metavar="FILE", help="prompt file with a row per file, by order or file_name")
    parser.add_argument("--json", action="store_true", help="print one JSON document in place of a table")
    parser.add_argument("--device", help="e.g. cpu or cuda:1; this machine's accelerator without it")


def run(args: Namespace) -> int:
    """Score and print."""
    from verl_digen.tools.score.files import find, prompts_of
    from verl_digen.tools.score.rewards import LocalRewards, chosen_device, parse

    entries = parse(args.reward)
    paths = find(args.files)
    rows = prompts_of(paths, prompt=args.prompt, prompt_file=args.prompts)
    rewards = LocalRewards(entries, chosen_device(args.device))
    with _quiet():
        lines = asyncio.run(_score_all(rewards, paths, rows))
    show = as_json if args.json else as_table
    print(show(lines, rewards.entries))
    return 1 if any(line.scored.errors for line in lines) else 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep each failure's traceback from stderr: the result says what failed and why."""
    logger = logging.getLogger("verl_digen.reward")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


async def _score_all(rewards: LocalRewards, paths: Sequence[Path], rows: Sequence[PromptRow]) -> list[Line]:
    """One line per file, in the order of `paths`."""
    from tqdm import tqdm

    from verl_digen.tools.score.rewards import Scored

    order = range(len(paths))
    if rewards.compare_groups:
        order = sorted(order, key=lambda number: (rows[number].uid, number))
    lines: dict[int, Line] = {}
    with tqdm(total=len(paths), unit="file", file=sys.stderr, disable=None) as bar:
        for chunk in _chunks(paths, rows, order, keep_groups=rewards.compare_groups):
            scores = iter(await rewards.score([sample for _, sample in chunk if not isinstance(sample, str)]))
            for number, sample in chunk:
                scored = Scored({}, {"file": sample}, None) if isinstance(sample, str) else next(scores)
                lines[number] = Line(str(paths[number]), rows[number].text, scored)
            bar.update(len(chunk))
    return [lines[number] for number in range(len(paths))]


def _chunks(
    paths: Sequence[Path], rows: Sequence[PromptRow], order: Sequence[int], *, keep_groups: bool
) -> Iterator[list[tuple[int, RewardInput | str]]]:
    """(position, sample, or why its file cannot be read) of as many files as fit `CHUNK_BYTES`; whole groups."""
    from verl_digen.tools.score.files import read
    from verl_digen.types import RewardInput

    chunk: list[tuple[int, RewardInput | str]] = []
    num_bytes, members = 0, dict[str, int]()
    for number in order:
        row = rows[number]
        is_new_group = row.uid not in members
        if chunk and num_bytes >= CHUNK_BYTES and (is_new_group or not keep_groups):
            yield chunk
            chunk, num_bytes = [], 0
        members[row.uid] = members.get(row.uid, -1) + 1
        try:
            pixels = read(paths[number])
        except ValueError as error:
            chunk.append((number, str(error)))
            continue
        chunk.append((number, RewardInput(pixels, row, members[row.uid])))
        num_bytes += pixels.nbytes
    if chunk:
        yield chunk


def as_json(lines: Sequence[Line], entries: Sequence[RewardEntry]) -> str:
    """One document: `files` in order, `summary` per reward, `num_failed`."""
    document = {
        "files": [
            {"file": line.file, "prompt": line.prompt, "scores": line.scored.parts, "total": line.scored.total}
            | ({"errors": line.scored.errors} if line.scored.errors else {})
            for line in lines
        ],
        "summary": _summaries(lines, entries),
        "num_failed": sum(1 for line in lines if line.scored.errors),
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def as_table(lines: Sequence[Line], entries: Sequence[RewardEntry]) -> str:
    """A row per file, then mean and standard deviation per reward; failures below, with their reasons."""
    names, totals = [entry.name for entry in entries], ["total"] * _has_total(entries)
    body = [
        [
            line.file,
            *(_number(line.scored.parts.get(name), "failed") for name in names),
            *(_number(line.scored.total, "-") for _ in totals),
            _short(line.prompt),
        ]
        for line in lines
    ]
    summaries = _summaries(lines, entries).values()
    feet = [
        [word, *(_number(summary[word], "-") for summary in summaries), ""]
        for word in (("mean", "std") if len(lines) > 1 else ())
    ]
    text = _aligned([["file", *names, *totals, "prompt"], *body, *feet])
    failed = [line for line in lines if line.scored.errors]
    said = [f"{len(failed)} of {len(lines)} files have no score:"] if failed else []
    said += [f"{line.file}: {reward}: {why}" for line in failed for reward, why in line.scored.errors.items()]
    return "\n".join([*text, *said])


def _summaries(lines: Sequence[Line], entries: Sequence[RewardEntry]) -> dict[str, dict[str, float | None]]:
    """Reward -> its `summary_of`, and that of the weighted sum."""
    found = [line.scored for line in lines]
    columns = {entry.name: [one.parts[entry.name] for one in found if entry.name in one.parts] for entry in entries}
    if _has_total(entries):
        columns["total"] = [one.total for one in found if one.total is not None]
    return {name: summary_of(values) for name, values in columns.items()}


def summary_of(values: Sequence[float]) -> dict[str, float | None]:
    """Number of values, mean, standard deviation (of a population), least and greatest; None of none."""
    measures = {"mean": fmean, "std": pstdev, "min": min, "max": max}
    return {"num": len(values), **{name: measure(values) if values else None for name, measure in measures.items()}}


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
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    padded = [
        [cell.ljust(width) if number in (0, len(columns) - 1) else cell.rjust(width) for cell in column]
        for number, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]
