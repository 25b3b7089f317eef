# SPDX-License-Identifier: Apache-2.0
"""The watchdog of a call that blocks until the process it waits for is killed, in virtual time."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError

from tests.chaos.loop import run_in_virtual_time
from verl_digen.errors import DeadlineMissed
from verl_digen.processes.deadlines import Bound
from verl_digen.trainer.watchdog import Watchdog

BOUND = Bound(20.0, "digen.deadlines.publish_s")


class Run:
    """A call that succeeds after `takes_s`, or fails when everything is killed. `num_silent` replicas hang, each
    noticed after the previous one, and silent from then on."""

    def __init__(self, takes_s, num_silent=0):
        self.takes_s, self.num_silent = takes_s, num_silent
        self.ended = []
        self.is_over = asyncio.Event()
        self.watchdog = Watchdog(
            asyncio.ensure_future, end_silent_replicas=self.end_silent_replicas, end_all=self.end_all
        )

    async def end_silent_replicas(self):
        if len(self.ended) < self.num_silent:
            self.ended.append("replica")
        return [f"r{number}" for number in range(len(self.ended))]

    def end_all(self):
        self.ended.append("all")
        self.is_over.set()

    async def call(self):
        with self.watchdog.watch("step 3: sending weights", BOUND):
            try:
                await asyncio.wait_for(self.is_over.wait(), self.takes_s)
            except asyncio.TimeoutError:
                return
            raise ActorDiedError


def run_call(**given):
    async def run():
        made = Run(**given)
        try:
            await made.call()
        finally:
            now_s = asyncio.get_running_loop().time()
        await asyncio.sleep(1000.0)  # a leftover guard would kill something now
        return made, now_s

    return run_in_virtual_time(run())


def test_a_call_in_time_ends_nothing_then_or_later():
    made, now_s = run_call(takes_s=19.0)
    assert made.ended == [] and now_s == pytest.approx(19.0)


def test_replicas_without_a_sign_of_life_are_ended_first_and_the_call_has_its_time_once_more_each_time():
    made, _ = run_call(takes_s=59.0, num_silent=2)
    assert made.ended == ["replica", "replica"]


@pytest.mark.parametrize("num_silent, waited_s", [(0, 20), (1, 40), (2, 60)])
def test_a_call_that_is_overdue_with_all_replicas_answering_ends_the_run_and_says_which_key(num_silent, waited_s):
    with pytest.raises(DeadlineMissed, match=rf"step 3: sending weights .* {waited_s} s.* digen\.deadlines\.publish_s"):
        run_call(takes_s=1e6, num_silent=num_silent)


def test_what_fails_by_itself_is_raised_as_it_is():
    async def run():
        made = Run(takes_s=1.0)
        made.is_over.set()
        await made.call()

    with pytest.raises(ActorDiedError):
        run_in_virtual_time(run())
