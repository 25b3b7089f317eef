# SPDX-License-Identifier: Apache-2.0
"""The virtual clock, the processes on it, and that a run is a function of its world."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError

from tests.chaos.faults import Fault, Kind
from tests.chaos.loop import Stuck, VirtualLoop, who_waits
from tests.chaos.processes import Cluster
from tests.chaos.simulation import simulate
from tests.chaos.world import World, draw_world


class Counter:
    """A process that counts."""

    count = 0

    async def add(self, number):
        self.count += number
        return self.count


def start(*faults):
    loop = VirtualLoop()
    cluster, target = Cluster(loop, 0, faults), Counter()
    return cluster, target, cluster.start("counter 0", target)


def test_a_loop_in_which_nothing_can_happen_any_more_is_stuck_and_says_who_waits():
    loop = VirtualLoop()

    async def waits_for_ever():
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="nothing is ready and no timer is set"):
        loop.run(waits_for_ever())
    assert any("waits_for_ever" in chain and "Event.wait" in chain for chain in who_waits(loop))


@pytest.mark.parametrize(
    ("kind", "error", "count", "is_alive"),
    [
        (Kind.DIES_BEFORE, ActorDiedError, 0, False),
        (Kind.DIES_AFTER, ActorDiedError, 1, False),
        (Kind.AWAY_BEFORE, ActorUnavailableError, 0, True),
        (Kind.AWAY_AFTER, ActorUnavailableError, 1, True),
        (Kind.RAISES, MemoryError, 0, True),
        (Kind.TWICE, None, 2, True),
        (Kind.SLOW, None, 1, True),
    ],
)
def test_a_fault_strikes_the_call_it_names(kind, error, count, is_alive):
    cluster, target, handle = start(Fault("counter 0", "add", 1, kind))
    assert cluster.get(handle.add.remote(0)) == 0
    reference = handle.add.remote(1)
    if error is None:
        assert cluster.get(reference) == count
    else:
        with pytest.raises(error):
            cluster.get(reference)
    assert target.count == count and [fault.kind for fault in cluster.struck] == [kind]
    if is_alive:
        assert cluster.get(handle.add.remote(1)) == count + 1
    else:
        with pytest.raises(RayActorError):
            cluster.get(handle.add.remote(1))


def test_a_process_that_hangs_answers_nothing_until_it_is_killed():
    cluster, _, handle = start(Fault("counter 0", "add", 0, Kind.HANGS))
    references = [handle.add.remote(1), handle.add.remote(1)]
    for reference in references:
        with pytest.raises(GetTimeoutError):
            cluster.get(reference, timeout=3600)
    assert cluster.unanswered() == ["counter 0.add #0", "counter 0.add #1"]
    cluster.kill(handle)
    for reference in references:
        with pytest.raises(ActorDiedError):
            cluster.get(reference)


def test_a_run_is_a_function_of_its_world():
    for seed in range(8):
        world = draw_world(seed)
        assert simulate(world) == simulate(world)
    assert len({simulate(World(seed=seed)).fingerprint for seed in range(8)}) == 8
