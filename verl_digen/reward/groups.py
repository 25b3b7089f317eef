# SPDX-License-Identifier: Apache-2.0
"""Rewards of whole groups: samples wait for the others of their group, then all are scored at once. No Ray.

| event | consequence |
| --- | --- |
| the last sample of a group arrives | one call with all of them, in order; each gets its own scores |
| a sample has no reward for another reason | `fail`: those that wait, or come until it is `settled`, fail too |
| a sample is cancelled while it waits | it leaves; a new one with its index takes the place |
| the call fails | all samples of the group fail |

A sample is brought here once every reward of single samples has its score, so a group that is called is whole. Samples
of different weight versions never meet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from verl_digen.processes.calls import tell
from verl_digen.reward.scoring import ScoringError
from verl_digen.types import PartScore, RewardInput

PartScores = Mapping[str, PartScore]
"""Reward -> its score, of one sample."""

Waiting = tuple[RewardInput, "asyncio.Future[PartScores]"]


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
