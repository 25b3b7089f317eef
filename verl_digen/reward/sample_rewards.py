# SPDX-License-Identifier: Apache-2.0
"""Client of all rewards of a run, in an agent loop worker: one sample in, its `Score` out.

    functions            one call to a process that holds them all, one of `reward.num_workers`
    rewards of samples   at the same time, one call to each reward's own pool
    rewards of groups    then, once every sample of the group is there, one call per pool with all of them

A reward that does not score a sample (`RewardEntry.scores`) is not called, and the sample has no part of that name.

Who waits: a sample for its scores, and with a reward of groups for the other samples of its group. Bound: the driver's
on scoring a chunk (`digen.deadlines.score_s`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl import DataProto

from verl_digen.config import DigenConfig, RewardEntry
from verl_digen.data.rows import ROW, object_column
from verl_digen.reward.combine import combined, find_combination
from verl_digen.reward.groups import GroupRooms, PartScores
from verl_digen.reward.layout import RewardLayout, reward_layout
from verl_digen.reward.named import reads_latents, scope_of
from verl_digen.reward.workers import RewardWorkers
from verl_digen.types import PartScore, RewardCall, RewardInput, Score

AUDIO = "audio"
"""Column with the `Audio` of a sample, or None, in the batch of one sample that goes to a function worker."""
NAMES = "reward_names"
"""Column with the names of the functions to call, a tuple, in the same batch."""


class SampleRewards:
    """See the module.

    Args:
        handles: workers in the order of `RewardLayout`.
    """

    def __init__(self, layout: RewardLayout, handles: Sequence[Any], digen: DigenConfig):
        answer_s = digen.deadlines.answer_s
        functions, pools = layout.split(handles)
        self._functions = RewardWorkers(functions, answer_s) if functions else None
        self._pools = {
            entry.name: RewardWorkers(pool, answer_s, run=_run_of(entry))
            for entry, pool in zip(layout.pools, pools, strict=True)
        }
        self._of_samples = [entry.name for entry in layout.pools if scope_of(entry) == "sample"]
        self._of_groups = [entry.name for entry in layout.pools if scope_of(entry) == "group"]
        self._weights = dict(layout.weights)
        self._shared = [name for name in layout.weights if name not in self._pools]
        """Functions without a pool; empty where a reward manager of the user's own is all that the workers hold."""
        self._of_latents = {entry.name for entry in layout.pools if reads_latents(entry)}
        self._entries = {entry.name: entry for entry in digen.reward.entries}
        self._combination = find_combination(digen.reward)
        self._groups = GroupRooms(self._score_group)

    @property
    def reads_latents(self) -> bool:
        """True if a reward of the run reads latents."""
        return bool(self._of_latents)

    @classmethod
    def of_run(cls, config: DictConfig, handles: Sequence[Any], digen: DigenConfig) -> SampleRewards:
        """The rewards of a run's config."""
        return cls(reward_layout(config, digen), handles, digen)

    async def score(self, sample: RewardInput, *, version: int, group_size: int) -> tuple[Score, tuple[float, float]]:
        """Score one sample -> (score, (start, end) in unix time).

        Args:
            version: weight version that generated it; samples of a group are compared with those of the same version.
            group_size: samples of its group.

        Raises:
            ScoringError: a reward kept failing, or died with the sample; the samples of its group that wait for it
                fail with it. RunStopped: a reward has no worker left, or
                `digen.reward.combine` failed.
        """
        started_s = time.time()
        try:
            base, parts, calls, scores = await self._alone(sample)
        except Exception as error:
            self.fail(sample.row.uid, sample.sample_index, str(error))
            raise
        if self._wanted(self._of_groups, sample):
            scores = {**scores, **await self._groups.score(sample, version=version, group_size=group_size)}
        for name, score in scores.items():
            parts[name] = score.value
            parts |= {f"{name}/{detail}": value for detail, value in score.details.items()}
            base += self._weights[name] * score.value
        if self._combination is not None:
            values = {name: parts[name] for name in self._weights if name in parts}
            base = combined(self._combination, values, self._weights)
        calls = (*calls, *(score.call for score in scores.values()))
        return Score(base, parts, calls), (started_s, time.time())

    def fail(self, uid: str, index: int, error: str) -> None:
        """Fail the samples of a group that wait for the others, because sample `index` has no reward."""
        if self._of_groups:
            self._groups.fail(uid, index, error)

    def settled(self, uid: str, indices: Collection[int]) -> None:
        """Forget the failures of samples that were told to the driver."""
        self._groups.settled(uid, indices)

    def _wanted(self, names: Sequence[str], sample: RewardInput) -> list[str]:
        """Select the rewards that score the sample, of `names`; the user's own function scores every one."""
        source, is_validation = sample.row.data_source, sample.is_validation
        return [
            name
            for name in names
            if name not in self._entries or self._entries[name].scores(source, is_validation=is_validation)
        ]

    def _read_by(self, name: str, sample: RewardInput) -> RewardInput:
        """The sample as the reward gets it: latents and condition, the larger part, only where they are read."""
        return sample if sample.latents is None or name in self._of_latents else replace(sample, latents=None)

    async def _alone(
        self, sample: RewardInput
    ) -> tuple[float, dict[str, float], tuple[RewardCall, ...], dict[str, PartScore]]:
        """Weighted sum, values and calls of the functions; scores of the pools for single samples."""
        names = self._wanted(self._of_samples, sample)
        pools = [self._pools[name].score((self._read_by(name, sample),)) for name in names]
        (base, parts, calls), scores = await asyncio.gather(self._call_functions(sample), asyncio.gather(*pools))
        return base, parts, calls, {name: score for name, (score,) in zip(names, scores, strict=True)}

    async def _call_functions(self, sample: RewardInput) -> tuple[float, dict[str, float], tuple[RewardCall, ...]]:
        names = self._wanted(self._shared, sample)
        if self._functions is None or (self._shared and not names):
            return 0.0, {}, ()
        data = DataProto(
            batch=TensorDict({"responses": torch.from_numpy(sample.pixels).unsqueeze(0)}, batch_size=1),
            non_tensor_batch={
                ROW: object_column([sample.row]),
                NAMES: object_column([tuple(names)]),
                AUDIO: object_column([sample.audio]),
            },
        )
        found: Mapping[str, Any] = await self._functions.score(data)
        calls = tuple(found["calls"]) if "calls" in found else ()  # a reward manager of the user's own has none
        return found["reward_score"], dict(found["reward_extra_info"]), calls

    async def _score_group(self, group: Sequence[RewardInput]) -> Sequence[PartScores]:
        names = self._wanted(self._of_groups, group[0])
        read = {name: tuple(self._read_by(name, sample) for sample in group) for name in names}
        scores = await asyncio.gather(*(self._pools[name].score(read[name]) for name in names))
        return [dict(zip(names, own, strict=True)) for own in zip(*scores, strict=True)]


def _run_of(entry: RewardEntry) -> int:
    """Consecutive samples for one worker: a full batch, or one group."""
    return entry.pool_settings.max_batch_size if scope_of(entry) == "sample" else 1
