# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from tests.chaos.loop import run_in_virtual_time
from verl_digen.processes.actors import pauses_s, retried


class Actor:
    """Raises these errors one after the other, then answers."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.asked_s = []

    async def call(self):
        self.asked_s.append(asyncio.get_running_loop().time())
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def away(times):
    return [ActorUnavailableError("away", None) for _ in range(times)]


def test_an_actor_that_is_away_for_a_moment_is_asked_again_later_and_later():
    actor = Actor(*away(3))
    assert run_in_virtual_time(retried(actor.call, 30.0)) == "answer"
    assert actor.asked_s == [0.0, 0.5, 1.5, 3.5]


def test_an_actor_that_stays_away_is_given_up_when_patience_ends():
    actor = Actor(*away(99))
    with pytest.raises(ActorUnavailableError):
        run_in_virtual_time(retried(actor.call, 30.0))
    assert actor.asked_s[-1] == pytest.approx(30.0)


def test_death_is_not_asked_twice():
    actor = Actor(ActorDiedError())
    with pytest.raises(ActorDiedError):
        run_in_virtual_time(retried(actor.call, 30.0))
    assert len(actor.asked_s) == 1


@pytest.mark.parametrize("patience_s", [0.1, 1.0, 30.0])
def test_pauses_add_up_to_the_patience(patience_s):
    assert sum(pauses_s(patience_s)) == pytest.approx(patience_s)
