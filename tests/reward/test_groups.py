# SPDX-License-Identifier: Apache-2.0
"""Rewards of groups: samples wait for the others of their group; none waits for one that cannot come."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.reward.samples import make_sample
from verl_digen.reward.sample_rewards import GroupRooms
from verl_digen.reward.scoring import ScoringError
from verl_digen.types import PartScore, RewardCall, RewardInput

CALL = RewardCall("r", 0.0, 1.0, 1, 0)


class Judge:
    """Scores a sample by its place in the call."""

    def __init__(self, error: Exception | None = None):
        self.groups: list[list[int]] = []
        self._error = error

    async def __call__(self, group: Sequence[RewardInput]):
        self.groups.append([sample.sample_index for sample in group])
        await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        return [{"r": PartScore(float(number), {}, CALL)} for number in range(len(group))]


def ask(rooms: GroupRooms, index: int, *, uid: str = "g", version: int = 0, size: int = 3) -> asyncio.Task:
    return asyncio.create_task(rooms.score(make_sample(index, uid=uid), version=version, group_size=size))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_group_is_scored_once_in_order_when_its_last_sample_is_there():
    judge = Judge()
    rooms = GroupRooms(judge)
    asked = {index: ask(rooms, index) for index in (2, 0)}
    other = ask(rooms, 1, uid="h")
    await settle()
    assert judge.groups == [] and not any(task.done() for task in asked.values())
    asked[1] = ask(rooms, 1)
    found = {index: (await task)["r"].value for index, task in asked.items()}
    assert judge.groups == [[0, 1, 2]] and found == {0: 0.0, 1: 1.0, 2: 2.0} and not other.done()
    other.cancel()
    await settle()
    assert not rooms._rooms, "no picture is kept"


async def test_samples_of_different_weight_versions_never_meet():
    judge = Judge()
    rooms = GroupRooms(judge)
    asked = [ask(rooms, 0, version=1, size=2), ask(rooms, 1, version=2, size=2)]
    await settle()
    assert judge.groups == []
    new = ask(rooms, 0, version=2, size=2)
    assert (await new)["r"].value == 0.0 and (await asked[1])["r"].value == 1.0
    asked[0].cancel()


async def test_a_cancelled_sample_leaves_its_place_to_a_new_one():
    judge = Judge()
    rooms = GroupRooms(judge)
    first, kept = ask(rooms, 0), ask(rooms, 1)
    await settle()
    first.cancel()
    await settle()
    again, last = ask(rooms, 0), ask(rooms, 2)
    values = [(await task)["r"].value for task in (again, kept, last)]
    assert values == [0.0, 1.0, 2.0] and first.cancelled()


async def test_a_sample_without_a_reward_fails_those_that_wait_and_come_until_the_driver_knows():
    rooms = GroupRooms(Judge())
    waiting, other = ask(rooms, 0), ask(rooms, 0, uid="h")
    await settle()
    rooms.fail("g", 1, "the scorer is down")
    late = ask(rooms, 2)
    for task in (waiting, late):
        with pytest.raises(ScoringError, match="sample 1 of its group has no reward: the scorer is down"):
            await asyncio.wait_for(task, 60)
    assert not other.done()
    rooms.settled("g", [0])  # another chunk of the group
    with pytest.raises(ScoringError):
        await asyncio.wait_for(ask(rooms, 2), 60)
    rooms.settled("g", [1, 2])
    fresh = [ask(rooms, index) for index in range(3)]
    assert [(await task)["r"].value for task in fresh] == [0.0, 1.0, 2.0]
    other.cancel()


async def test_a_call_that_fails_fails_every_sample_of_the_group():
    rooms = GroupRooms(Judge(ScoringError("the judge is down")))
    asked = [ask(rooms, index) for index in range(3)]
    for task in asked:
        with pytest.raises(ScoringError, match="the judge is down"):
            await task
