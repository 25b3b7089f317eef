# SPDX-License-Identifier: Apache-2.0
"""Restarts of fake replicas driven by events, in virtual time."""

import asyncio
import random

import pytest

from tests.chaos.loop import run_in_virtual_time
from verl_digen.trainer.restarts import Restarts


class Starts:
    """Starts that take `takes_s` and fail for the numbers in `fails`."""

    def __init__(self, takes_s=10.0, fails=()):
        self.takes_s, self.fails = takes_s, set(fails)
        self.numbers = []

    async def __call__(self, number):
        self.numbers.append(number)
        await asyncio.sleep(self.takes_s)
        if number in self.fails:
            raise RuntimeError("no device")
        return f"replica {number}"


def restarts_of(starts, num_replicas=3, max_restarts=2, start_s=60.0):
    return Restarts(
        asyncio.ensure_future, starts, num_replicas=num_replicas, max_restarts=max_restarts, start_s=start_s
    )


def test_a_lost_replica_is_replaced_once_under_a_number_of_its_own():
    async def run():
        starts = Starts()
        restarts = restarts_of(starts)
        restarts.replace_lost(num_living=3)
        assert restarts.num_begun == 0
        restarts.replace_lost(num_living=2)
        restarts.replace_lost(num_living=2)  # it is still starting
        assert restarts.num_begun == 1 and restarts.take_ready() == []
        await asyncio.sleep(11.0)
        assert restarts.take_ready() == ["replica 3"] and restarts.take_ready() == []
        restarts.replace_lost(num_living=3)
        return restarts.num_begun, starts.numbers

    assert run_in_virtual_time(run()) == (1, [3])


def test_no_more_replicas_are_started_than_the_limit_allows(caplog):
    async def run():
        restarts = restarts_of(Starts(), max_restarts=2)
        restarts.replace_lost(num_living=0)
        await asyncio.sleep(11.0)
        restarts.replace_lost(num_living=0)
        return restarts.num_begun, restarts.take_ready()

    assert run_in_virtual_time(run()) == (2, ["replica 3", "replica 4"])
    assert "digen.rollout.max_restarts=2 is used up" in caplog.text


@pytest.mark.parametrize("starts", [Starts(fails={3}), Starts(takes_s=1e6)], ids=["fails", "hangs"])
def test_a_start_that_fails_or_hangs_counts_and_another_one_follows(starts, caplog):
    async def run():
        restarts = restarts_of(starts)
        restarts.replace_lost(num_living=2)
        await asyncio.sleep(100.0)
        assert restarts.take_ready() == []
        starts.takes_s = 1.0
        restarts.replace_lost(num_living=2)
        await asyncio.sleep(2.0)
        return restarts.take_ready()

    assert run_in_virtual_time(run()) == ["replica 4"]
    assert "could not be started again" in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_there_are_never_more_replicas_than_at_the_start(seed):
    async def run():
        rng = random.Random(seed)
        restarts = restarts_of(Starts(takes_s=5.0), max_restarts=10)
        living = 3
        for _ in range(30):
            living -= rng.randint(0, living)
            restarts.replace_lost(living)
            await asyncio.sleep(rng.choice((0.0, 6.0)))
            living += len(restarts.take_ready())
            assert living <= 3
        assert restarts.num_begun <= 10

    run_in_virtual_time(run())
