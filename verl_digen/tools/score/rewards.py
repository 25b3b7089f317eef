# SPDX-License-Identifier: Apache-2.0
"""Rewards by name, made in this process, and their scores of files, as a table and as JSON."""

import asyncio
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from verl_digen.config import RewardEntry
from verl_digen.config.reward import reward_entry
from verl_digen.require import refusing, require
from verl_digen.reward.named import find, scorer_of
from verl_digen.reward.sample_rewards import weighted
from verl_digen.reward.scoring import ScoringError
from verl_digen.tools.score.files import read
from verl_digen.types import PartScore, PromptRow, RewardInput

CALL_S = 600.0
"""Time of one call of a reward, after which it counts as failed."""


@dataclass(frozen=True)
class Scored:
    """Scores of one sample."""

    parts: Mapping[str, float]
    """Each reward's value, and its details as `name/detail`; without those that failed."""
    errors: Mapping[str, str]
    """Rewards that failed, with the reason."""
    total: float | None
    """Weighted sum; None if a reward failed."""


def parse(text: str) -> list[RewardEntry]:
    """Read the rewards of a command line. ValueError: it is neither, or an entry breaks a rule.

    Example:
        parse("ocr,pickscore")                             # two, each with weight 1
        parse("{ocr: 1.0, pick: {weight: 0.5, path: X}}")  # as digen.reward.functions takes them
        parse("mine.py:score")                             # your function or class
    """
    if not text.strip().startswith("{"):
        names = [name.strip() for name in text.split(",")]
        require(all(names), "REWARD must be names of rewards, separated by commas", text, "write e.g. ocr")
        found = [_named(name) for name in names]
        is_clear = len({entry.name for entry in found}) == len(found)
        require(is_clear, "REWARD must name different rewards", text, "write {a: {weight: 1, reward: FILE.py:NAME}}")
        return found
    with refusing("REWARD must be names or a YAML mapping", text, "write {ocr: 1.0}"):
        given: Any = OmegaConf.to_container(OmegaConf.create(text))
    require(bool(given), "REWARD must name a reward", text, "write {ocr: 1.0}")
    return [reward_entry(str(name), value) for name, value in given.items()]


def _named(name: str) -> RewardEntry:
    own = name.replace(":", ".").rpartition(".")[2]  # mine.py:score -> score
    return reward_entry(own, 1.0 if own == name else {"weight": 1.0, "reward": name})


class LocalRewards:
    """Rewards in this process, each made once on `device`, with a queue each: calls that overlap share batches.
    ValueError: an unknown reward, a broken rule of one, or settings of processes that a run has and this has not."""

    def __init__(self, entries: Sequence[RewardEntry], device: torch.device):
        for entry in entries:
            pool = entry.pool_settings
            require(
                pool.num_workers == 1 and pool.num_gpus == 0 and not pool.timeshare,
                f"{entry.key}: num_workers, num_gpus and timeshare belong to a run",
                {"num_workers": pool.num_workers, "num_gpus": pool.num_gpus, "timeshare": pool.timeshare},
                "leave them out; --device chooses the device",
            )
        self.entries = tuple(entries)
        self._scopes = {entry.name: find(entry).scope for entry in entries}
        self._scorers = {entry.name: scorer_of(entry, device, 0, CALL_S) for entry in entries}

    @property
    def compare_groups(self) -> bool:
        """True if a reward compares all samples of a prompt."""
        return "group" in self._scopes.values()

    async def score(self, samples: Sequence[RewardInput]) -> list[Scored]:
        """Score samples; those with equal `row.uid` are one group."""
        columns = await asyncio.gather(*(self._column(entry.name, samples) for entry in self.entries))
        return [self._scored(row) for row in zip(*columns, strict=True)]

    async def _column(self, name: str, samples: Sequence[RewardInput]) -> list[PartScore | ScoringError]:
        groups: dict[object, list[int]] = {}
        for number, sample in enumerate(samples):
            groups.setdefault(sample.row.uid if self._scopes[name] == "group" else number, []).append(number)
        column: dict[int, PartScore | ScoringError] = {}

        async def attempt(numbers: Sequence[int]) -> None:
            try:
                scores = await self._scorers[name].score([samples[number] for number in numbers])
                column.update(zip(numbers, scores, strict=True))
            except ScoringError as error:
                column.update(dict.fromkeys(numbers, error))

        await asyncio.gather(*map(attempt, groups.values()))
        return [column[number] for number in range(len(samples))]

    def _scored(self, row: Sequence[PartScore | ScoringError]) -> Scored:
        """One sample, from its scores by all rewards in order."""
        named = dict(zip((entry.name for entry in self.entries), row, strict=True))
        errors = {name: str(one) for name, one in named.items() if isinstance(one, ScoringError)}
        scores = {name: one for name, one in named.items() if isinstance(one, PartScore)}
        total, parts = weighted(scores, {entry.name: entry.weight for entry in self.entries})
        return Scored(parts, errors, None if errors else total)


def chosen_device(given: str | None) -> torch.device:
    """The device that `--device` names; without it this machine's accelerator, or the CPU. Raises ValueError."""
    if given is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else found
    with refusing("--device must be a device that PyTorch has here", given, "leave it out, or name one, such as cpu"):
        return torch.empty(0, device=given).device


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


def score_files(rewards: LocalRewards, paths: Sequence[Path], rows: Sequence[PromptRow]) -> list[Line]:
    """One line per file, in the order of `paths`; `rows` are their prompts. Shows its progress on stderr."""
    logger = logging.getLogger("verl_digen.reward")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # no tracebacks: the result says what failed and why
    try:
        return asyncio.run(_score_all(rewards, paths, rows))
    finally:
        logger.setLevel(level)


async def _score_all(rewards: LocalRewards, paths: Sequence[Path], rows: Sequence[PromptRow]) -> list[Line]:
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
