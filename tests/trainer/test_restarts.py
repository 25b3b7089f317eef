# SPDX-License-Identifier: Apache-2.0
"""Restarts of fake replicas driven by events, in virtual time."""

import asyncio
import random
from types import SimpleNamespace

import pytest
import ray

from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.processes.relays import Route
from verl_digen.trainer.replicas import Replicas

pytestmark = pytest.mark.virtual_time


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
        return SimpleNamespace(server_address=f"r{number}", server_handle=None)


class Living(list):
    """verl's list of replicas, and its balancer."""

    @property
    def replicas(self):
        return self

    add_replicas = list.extend
    global_load_balancer = SimpleNamespace(add_servers=SimpleNamespace(remote=lambda servers: None))


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)


def replicas_of(starts, max_restarts=2):
    living = Living([SimpleNamespace(server_address=f"r{number}", server_handle=None) for number in range(3)])
    config, loop = DeadlinesConfig(first_s=60.0), SimpleNamespace(begin=asyncio.ensure_future)
    replicas = Replicas(*(living, living, config, loop), workers=Route(1.0), start=starts, max_restarts=max_restarts)
    return replicas, living


def names(living):
    return [replica.server_address for replica in living]


async def test_a_lost_replica_is_replaced_once_under_a_number_of_its_own():
    starts = Starts()
    replicas, living = replicas_of(starts)
    replicas.replace_lost()
    assert replicas.num_restarts == 0
    living.pop()
    replicas.replace_lost()
    replicas.replace_lost()  # it is still starting
    replicas.add_started()
    assert replicas.num_restarts == 1 and names(living) == ["r0", "r1"]
    await asyncio.sleep(11.0)
    replicas.add_started()
    replicas.add_started()
    replicas.replace_lost()
    assert names(living) == ["r0", "r1", "r3"] and starts.numbers == [3]


async def test_no_more_replicas_are_started_than_the_limit_allows(caplog):
    replicas, living = replicas_of(Starts(), max_restarts=2)
    living.clear()
    replicas.replace_lost()
    await asyncio.sleep(11.0)
    replicas.replace_lost()
    replicas.add_started()
    assert names(living) == ["r3", "r4"]
    assert "digen.rollout.max_restarts=2 is used up" in caplog.text


@pytest.mark.parametrize("starts", [Starts(fails={3}), Starts(takes_s=1e6)], ids=["fails", "hangs"])
async def test_a_start_that_fails_or_hangs_counts_and_another_one_follows(starts, caplog):
    replicas, living = replicas_of(starts)
    living.pop()
    replicas.replace_lost()
    await asyncio.sleep(100.0)
    replicas.add_started()
    assert names(living) == ["r0", "r1"]
    starts.takes_s = 1.0
    replicas.replace_lost()
    await asyncio.sleep(2.0)
    replicas.add_started()
    assert names(living) == ["r0", "r1", "r4"]
    assert "could not be started again" in caplog.text


@pytest.mark.parametrize("seed", range(20))
async def test_there_are_never_more_replicas_than_at_the_start(seed):
    rng = random.Random(seed)
    replicas, living = replicas_of(Starts(takes_s=5.0), max_restarts=10)
    for _ in range(30):
        del living[: rng.randint(0, len(living))]
        replicas.replace_lost()
        await asyncio.sleep(rng.choice((0.0, 6.0)))
        replicas.add_started()
        assert len(living) <= 3
    assert replicas.num_restarts <= 10
