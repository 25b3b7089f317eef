# SPDX-License-Identifier: Apache-2.0
"""Rewards by name, made in this process, and their scores of samples; a run's batches, retries and rules (reward/)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import OmegaConf

from verl_digen.config import RewardEntry
from verl_digen.config.reward import reward_entry
from verl_digen.require import require
from verl_digen.reward.named import find, scorer_of
from verl_digen.reward.sample_rewards import weighted
from verl_digen.reward.scoring import ScoringError
from verl_digen.types import PartScore, RewardInput

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
    """Read the rewards of a command line.

    Example:
        parse("ocr,pickscore")                             # two, each with weight 1
        parse("{ocr: 1.0, pick: {weight: 0.5, path: X}}")  # as digen.reward.functions takes them
        parse("mine.py:score")                             # your function or class

    Raises:
        ValueError: it is neither, or an entry breaks a rule.
    """
    if not text.strip().startswith("{"):
        names = [name.strip() for name in text.split(",")]
        require(all(names), "REWARD must be names of rewards, separated by commas", text, "write e.g. ocr")
        return [_named(name) for name in names]
    try:
        given: Any = OmegaConf.to_container(OmegaConf.create(text))
    except Exception as error:  # YAML's and OmegaConf's errors have no common class
        line = str(error).strip().splitlines()[0]
        raise ValueError(
            f"REWARD must be names or a YAML mapping, got {text!r} ({line}); write {{ocr: 1.0}}"
        ) from error
    require(bool(given), "REWARD must name a reward", text, "write {ocr: 1.0}")
    return [reward_entry(str(name), value) for name, value in given.items()]


def _named(name: str) -> RewardEntry:
    if ":" not in name and "." not in name:
        return reward_entry(name, 1.0)
    own = name.replace(":", ".").rpartition(".")[2]  # mine.py:score -> score
    return reward_entry(own, {"weight": 1.0, "reward": name})


class LocalRewards:
    """Rewards in this process, with a queue each: calls that overlap share batches.

    Args:
        entries: rewards; each is made once, on `device`.

    Raises:
        ValueError: an unknown reward, a broken rule of one, or settings of processes that a run has and this has not.
    """

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
        found = await asyncio.gather(
            *(self._attempt(name, [samples[number] for number in numbers]) for numbers in groups.values())
        )
        column: dict[int, PartScore | ScoringError] = {}
        for numbers, scores in zip(groups.values(), found, strict=True):
            column |= zip(numbers, scores, strict=True)
        return [column[number] for number in range(len(samples))]

    async def _attempt(self, name: str, samples: Sequence[RewardInput]) -> Sequence[PartScore | ScoringError]:
        try:
            return await self._scorers[name].score(samples)
        except ScoringError as error:
            return [error] * len(samples)

    def _scored(self, row: Sequence[PartScore | ScoringError]) -> Scored:
        """One sample, from its scores by all rewards in order."""
        named = dict(zip((entry.name for entry in self.entries), row, strict=True))
        errors = {name: str(one) for name, one in named.items() if isinstance(one, ScoringError)}
        scores = {name: one for name, one in named.items() if isinstance(one, PartScore)}
        total, parts = weighted(scores, {entry.name: entry.weight for entry in self.entries})
        return Scored(parts, errors, None if errors else total)


def chosen_device(given: str | None) -> torch.device:
    """The device that `--device` names; without it this machine's accelerator, or the CPU.

    Raises:
        ValueError: PyTorch has no such device.
    """
    if given is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else found
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        line = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"--device must be a device that PyTorch has here, got {given!r} ({line})") from error
    return device
