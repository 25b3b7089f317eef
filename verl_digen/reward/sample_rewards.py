# SPDX-License-Identifier: Apache-2.0
"""Client of all rewards of a run, in an agent loop worker: one sample in, its `Score` out.

    rewards of samples   at the same time, one call to each pool; the functions without one of their own share a pool
    rewards of groups    then, once every sample of the group is there, one call per pool with all of them

Samples wait for the others of their group in `GroupRooms`, which needs no Ray:

| event | consequence |
| --- | --- |
| the last sample of a group arrives | one call with all of them, in order; each gets its own scores |
| a sample has no reward for another reason | `fail`: those that wait, or come until it is `settled`, fail too |
| a sample is cancelled while it waits | it leaves; a new one with its index takes the place |
| the call fails | all samples of the group fail |

A sample is brought there once every reward of single samples has its score, so a group that is called is whole. Samples
of different weight versions never meet.

A reward that does not score a sample (`RewardEntry.scores`) is not called, and the sample has no part of that name. The
driver bounds the wait for a chunk's scores (`RewardConfig.score_s`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from omegaconf import DictConfig
from ray.exceptions import ActorUnavailableError

from verl_digen.config import DigenConfig, RewardEntry
from verl_digen.errors import plain
from verl_digen.processes.calls import tell
from verl_digen.processes.workers import WorkerPool
from verl_digen.reward.combine import combined, find_combination
from verl_digen.reward.named import find, has_custom, has_own_manager, reads_latents
from verl_digen.reward.scoring import ScoringError
from verl_digen.types import PartScore, RewardInput, Score

PartScores = Mapping[str, PartScore]
"""Reward -> its score, of one sample."""

Waiting = tuple[RewardInput, "asyncio.Future[PartScores]"]

SHARED = ""
"""Name of the pool that holds the functions without one of their own; the others have their reward's."""
WORKERS_KEY = "reward.num_workers or digen.reward.functions.NAME.num_workers"
"""Config key of a pool's number of workers, for messages."""
MANAGER = "manager"
"""Name of the one score that the user's own reward manager gives a sample; what else it returns are details."""


@dataclass(frozen=True)
class _Pool:
    """Workers that score with one reward, or with all functions that share them."""

    rewards: tuple[str, ...]
    workers: WorkerPool
    scope: str = "sample"
    reads_latents: bool = False


class SampleRewards:
    """Client of the pools. `handles`: pool -> its workers. `weights`: reward -> weight. What is no pool's is a function
    of `SHARED`."""

    def __init__(self, handles: Mapping[str, Sequence[Any]], weights: Mapping[str, float], digen: DigenConfig):
        self._weights, self._deadlines = dict(weights), digen.deadlines
        self._entries = {entry.name: entry for entry in digen.reward.entries}
        shared = tuple(name for name in weights if name not in handles)
        self._pools = [_Pool(shared, self._workers(handles[SHARED], 1))] if shared else []
        self._pools += [self._own_pool(self._entries[name], handles[name]) for name in weights if name in handles]
        self._combination = find_combination(digen.reward)
        self._groups = GroupRooms(lambda group: self._scores("group", group))

    def _own_pool(self, entry: RewardEntry, handles: Sequence[Any]) -> _Pool:
        """The pool of one reward. Consecutive samples go to one worker until it has a full batch, or a group."""
        scope = find(entry).scope
        run = entry.pool_settings.max_batch_size if scope == "sample" else 1
        return _Pool((entry.name,), self._workers(handles, run), scope, reads_latents(entry))

    def _workers(self, handles: Sequence[Any], run: int) -> WorkerPool:
        return WorkerPool(handles, self._deadlines, kind="reward", key=WORKERS_KEY, run=run)

    @classmethod
    def of_run(cls, config: DictConfig, handles: Mapping[str, Sequence[Any]], digen: DigenConfig) -> "SampleRewards":
        weights = digen.reward.weights(has_custom=has_custom(config))
        if not has_own_manager(config):
            weights = {MANAGER: 1.0, **{name: weights[name] for name in weights if name in handles}}
        return cls(handles, weights, digen)

    async def score(self, sample: RewardInput, *, version: int, group_size: int) -> tuple[Score, tuple[float, float]]:
        """Score one sample -> (score, (start, end) in unix time). Samples of a group are compared within one weight
        `version`.

        ScoringError if a reward kept failing, or died with the sample; the samples of its group that wait for it fail
        with it. RunStopped if a reward has no worker left, or `digen.reward.combine` failed.
        """
        started_s = time.time()
        try:
            (scores,) = await self._scores("sample", (sample,))
        except Exception as error:
            self.fail(sample.row.uid, sample.sample_index, str(plain(error)))
            raise
        if any(self._wanted("group", sample)):
            scores = {**scores, **await self._groups.score(sample, version=version, group_size=group_size)}
        total, parts = weighted(scores, self._weights)
        if self._combination is not None:
            total = combined(self._combination, {name: one.value for name, one in scores.items()}, self._weights)
        calls = tuple(score.call for score in scores.values())
        return Score(total, parts, calls), (started_s, time.time())

    def fail(self, uid: str, index: int, error: str) -> None:
        """Fail the samples of a group that wait for the others, because sample `index` has no reward."""
        if any(pool.scope == "group" for pool in self._pools):
            self._groups.fail(uid, index, error)

    def settled(self, uid: str, indices: Collection[int]) -> None:
        """Forget the failures of samples that the driver knows of."""
        self._groups.settled(uid, indices)

    async def _scores(self, scope: Literal["sample", "group"], samples: Sequence[RewardInput]) -> list[PartScores]:
        """Scores of samples by all rewards of a scope that score the first one, one call per pool."""
        lean = tuple(one if one.latents is None else replace(one, latents=None) for one in samples)
        calls = [
            pool.workers.call_together("score", (names, tuple(samples) if pool.reads_latents else lean))
            for pool, names in self._wanted(scope, samples[0])
        ]
        try:
            found = await asyncio.gather(*calls)
        except ActorUnavailableError as error:
            raise ScoringError(f"the reward worker died whenever it scored this sample: {error}") from error
        return [{name: of[place] for one in found for name, of in one.items()} for place in range(len(samples))]

    def _wanted(self, scope: str, sample: RewardInput) -> Iterator[tuple[_Pool, tuple[str, ...]]]:
        """Pools with rewards that score the sample, and these; the user's own function scores every one."""
        source, is_validation = sample.row.data_source, sample.is_validation
        for pool in self._pools:
            names = tuple(
                name
                for name in pool.rewards
                if name not in self._entries or self._entries[name].scores(source, is_validation=is_validation)
            )
            if names and pool.scope == scope:
                yield pool, names


def weighted(scores: PartScores, weights: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """(weighted sum, value of each reward and details as `NAME/detail`) of one sample."""
    total, parts = 0.0, dict[str, float]()
    for name, score in scores.items():
        total += weights[name] * score.value
        parts[name] = score.value
        parts |= {f"{name}/{detail}": value for detail, value in score.details.items()}
    return total, parts


class GroupRooms:
    """Waiting samples of all groups. `score_group`: samples of a group, in order -> scores per sample."""

    def __init__(self, score_group: Callable[[Sequence[RewardInput]], Awaitable[Sequence[PartScores]]]):
        self._score_group = score_group
        self._rooms: dict[tuple[str, int], dict[int, Waiting]] = {}
        """(group, weight version) -> sample index -> the sample that waits."""
        self._failed: dict[str, dict[int, str]] = {}
        """Group -> sample index -> why it has no reward."""
        self._calls: set[asyncio.Task[None]] = set()

    async def score(self, sample: RewardInput, *, version: int, group_size: int) -> PartScores:
        """Wait for the other samples of the group -> the sample's scores. ScoringError if a reward failed on the group,
        or another sample of it has no reward."""
        key, index = (sample.row.uid, version), sample.sample_index
        if sample.row.uid in self._failed:
            raise ScoringError(_told(self._failed[sample.row.uid]))
        room = self._rooms.setdefault(key, {})
        answer: asyncio.Future[PartScores] = asyncio.get_running_loop().create_future()
        room[index] = sample, answer
        if len(room) == group_size:
            del self._rooms[key]
            call = asyncio.create_task(self._call([room[number] for number in sorted(room)]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        try:
            return await answer
        finally:
            if room.get(index, (None, None))[1] is answer:  # else a new sample has its place
                del room[index]
            if not room and self._rooms.get(key) is room:
                del self._rooms[key]

    def fail(self, uid: str, index: int, error: str) -> None:
        """Fail the samples of a group that wait, or come, because another one of it has no reward: the driver draws
        samples again once their whole chunk has an outcome."""
        failed = self._failed.setdefault(uid, {})
        failed[index] = error
        for key in [key for key in self._rooms if key[0] == uid]:
            waiting = [answer for _, answer in self._rooms.pop(key).values()]
            tell(waiting, [ScoringError(_told(failed)) for _ in waiting])

    def settled(self, uid: str, indices: Collection[int]) -> None:
        """Forget the failures of samples whose outcome the driver has; new ones of these may come."""
        failed = self._failed.pop(uid, {})
        left = {index: error for index, error in failed.items() if index not in indices}
        if left:
            self._failed[uid] = left

    async def _call(self, members: Sequence[Waiting]) -> None:
        outcomes: Sequence[PartScores | Exception]
        try:
            outcomes = await self._score_group([sample for sample, _ in members])
        except Exception as error:  # raised for every sample of the group
            outcomes = [error] * len(members)
        tell((answer for _, answer in members), outcomes)


def _told(failed: Mapping[int, str]) -> str:
    index, error = next(iter(failed.items()))
    return f"sample {index} of its group has no reward: {error}"
