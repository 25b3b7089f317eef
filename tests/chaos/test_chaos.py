# SPDX-License-Identifier: Apache-2.0
"""Random worlds in which nothing may go wrong, worlds in which something once did, and bugs that must be found."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError

from tests.chaos.faults import AGENT, CALLS, KINDS, QUEUE, RANK, REWARD, Fault, Kind, is_possible
from tests.chaos.loop import Stuck, VirtualLoop, who_waits
from tests.chaos.planted import BUGS, hunt, planted
from tests.chaos.processes import Cluster
from tests.chaos.simulation import run_world, shrink, simulate
from tests.chaos.world import World, draw_world
from tests.grid import IN_GRID

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("first", "num_orders"), [(0, 200), pytest.param(200, 800, marks=IN_GRID)], ids=["some", "many"]
)
def test_nothing_is_lost_duplicated_mixed_leaked_stuck_or_crashed_in_any_order(first, num_orders):
    verdicts = [run_world(seed) for seed in range(first, first + num_orders)]
    failed = [verdict.world.seed for verdict in verdicts if verdict.problems]
    assert not failed, f"python -m tests.chaos --world {failed[0]}"
    assert sum(verdict.end == "whole" for verdict in verdicts) > num_orders / 2
    assert {fault.kind for verdict in verdicts for fault in verdict.struck} == {*KINDS}, "every kind of fault struck"


EVERY_CALL = World(
    seed=2,
    num_replicas=3,
    num_rewards=2,
    num_batches=3,
    chunk_size=1,
    assist="always",
    max_versions=1,
    extra_prompts=2,
    validates=(1,),
)
"""A small world in which every remote call is made, except for those that follow a failure."""

LONG = Fault("server 1", "generate_all", 1, Kind.HANGS)
"""Makes a run long enough for a few heartbeats."""

ONLY_AFTER = {
    (RANK, "abort"): Fault("rank 0", "accumulate", 1, Kind.RAISES),
    (AGENT, "discard_chunk"): LONG,
    (AGENT, "__ray_ready__"): LONG,
    (QUEUE, "__ray_ready__"): LONG,
    (REWARD, "__ray_ready__"): Fault("reward 0", "score", 0, Kind.HANGS),
}
"""Call -> the failure that it follows."""


@pytest.mark.parametrize("call", [0, pytest.param(1, marks=IN_GRID)], ids=["first", "second"])
@pytest.mark.parametrize("process_kind", CALLS)
def test_a_run_survives_or_ends_with_a_reason_whichever_call_fails(process_kind, call):
    struck = set()
    for method in CALLS[process_kind]:
        for kind in (kind for kind in KINDS if is_possible(process_kind, method, kind)):
            faults = [Fault(f"{process_kind} 0", method, call, kind)]
            faults += [ONLY_AFTER[process_kind, method]] if (process_kind, method) in ONLY_AFTER else []
            verdict = simulate(EVERY_CALL.with_faults(*faults))
            assert not verdict.problems, (verdict.world, verdict.problems)
            struck |= {fault.method for fault in verdict.struck}
    assert call or struck >= set(CALLS[process_kind]), "every call is made in this world"


REGRESSIONS = {
    "two replicas hang in one publication, the second while the first one's weights are sent again": World(
        num_replicas=3,
        group_size=1,
        faults=(Fault("engine 2", "update_weights", 0, Kind.HANGS), Fault("server 0", "seal_update", 1, Kind.HANGS)),
    ),
    "a replica is loading for two steps, in which the trainer generates everything": World(
        seed=12000517,
        num_replicas=1,
        group_size=1,
        num_batches=2,
        assist="always",
        faults=(Fault("server 0", "activate_weights", 0, Kind.SLOW),),
    ),
    "a replica dies while a trainer rank is out of reach in a publication": World(
        num_ranks=2,
        group_size=1,
        faults=(
            Fault("server 0", "__ray_ready__", 1, Kind.DIES_BEFORE),
            Fault("rank 0", "update_weights", 0, Kind.AWAY_BEFORE),
        ),
    ),
    "a trainer rank hangs in a publication to a replica that is dead": World(
        num_replicas=1,
        num_ranks=2,
        group_size=1,
        faults=(
            Fault("rank 1", "update_weights", 0, Kind.HANGS),
            Fault("engine 0", "__ray_ready__", 1, Kind.DIES_BEFORE),
        ),
    ),
    "a replica with several slots hangs while it encodes a prompt for the trainer": World(
        seed=21000627,
        slots_per_replica=3,
        num_prompts=3,
        assist="always",
        extra_prompts=2,
        faults=(Fault("server 0", "encode", 1, Kind.HANGS),),
    ),
    "an agent loop worker is missed while the batch that it broke is aborted": World(
        seed=21005965,
        num_replicas=1,
        num_rewards=2,
        num_prompts=2,
        group_size=1,
        faults=(Fault("reward 0", "score", 0, Kind.HANGS), Fault("agent 0", "__ray_ready__", 0, Kind.DIES_BEFORE)),
    ),
}
"""Worlds that once failed."""


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_once_went_wrong_goes_well(name):
    verdict = simulate(REGRESSIONS[name])
    assert verdict.struck and {*verdict.struck} <= {*verdict.world.faults} and not verdict.problems


ALL_DIE = tuple(Fault(f"server {number}", "generate_all", 1, Kind.DIES_BEFORE) for number in (0, 1))
ALL_DIE_LATER = tuple(Fault(f"server {number}", "generate_all", 2, Kind.DIES_BEFORE) for number in (0, 1))


@pytest.mark.parametrize(
    "world",
    [
        World(num_prompts=3, num_batches=2, faults=ALL_DIE),
        World(num_prompts=3, num_batches=3, max_versions=1, assist="always", faults=ALL_DIE),
        World(num_prompts=3, num_batches=3, assist="bts", faults=ALL_DIE),
        World(num_prompts=3, num_batches=3, chunk_size=1, assist="always", faults=ALL_DIE_LATER),
        World(
            num_prompts=3,
            num_batches=3,
            faults=(*ALL_DIE, *(Fault(f"server {number}", "generate_all", 0, Kind.DIES_BEFORE) for number in (2, 3))),
        ),
        World(
            num_batches=2,
            faults=tuple(Fault(f"engine {number}", "update_weights", 0, Kind.DIES_BEFORE) for number in (0, 1)),
        ),
    ],
    ids=["in a step", "with stale samples", "assisted", "while they encode", "twice", "in a publication"],
)
def test_a_run_that_lost_every_replica_waits_for_one_that_is_started(world):
    verdict = simulate(world)
    assert (verdict.end, verdict.problems) == ("whole", ()) and {*verdict.struck} == {*world.faults}


def while_validating(num_replicas, call, kind, **world):
    faults = tuple(Fault(f"server {number}", "generate_all", call, kind) for number in range(num_replicas))
    return World(num_replicas=num_replicas, num_prompts=3, num_batches=2, validates=(1, 2), faults=faults, **world)


VALIDATES_ALONE = while_validating(1, 3, Kind.DIES_BEFORE)


@pytest.mark.parametrize(
    "world",
    [VALIDATES_ALONE, while_validating(2, 3, Kind.HANGS), while_validating(1, 5, Kind.DIES_BEFORE, max_versions=1)],
    ids=["one dies", "both hang", "with stale samples"],
)
def test_a_validation_that_lost_every_replica_waits_for_one_and_has_every_prompt_under_its_version(world):
    watched = []
    verdict = simulate(world, watched.append)
    assert (verdict.end, verdict.problems) == ("whole", ()) and {*verdict.struck} == {*world.faults}
    assert watched[0].replaced == 1 and not watched[0].unvalidated


@pytest.mark.parametrize("world", [World(num_prompts=3, num_batches=2, faults=ALL_DIE), VALIDATES_ALONE])
def test_a_run_that_lost_every_replica_ends_with_the_reason_where_none_may_be_started(world):
    def forbid(simulation):
        simulation.trainer._replicas._max_restarts = 0

    verdict = simulate(world, forbid)
    assert verdict.end.startswith("stopped: every rollout replica is lost") and not verdict.problems
    assert verdict.end.endswith("out of memory is common")


@pytest.mark.long
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name):
    bug = BUGS[name]
    if bug.world is None:
        assert hunt(bug, max_orders=300) is not None
        return
    assert not simulate(bug.world).problems
    with planted(bug):
        assert simulate(bug.world).problems


def test_a_world_that_fails_shrinks_to_the_fault_that_matters():
    needless = (Fault("server 0", "generate_all", 1, Kind.SLOW), Fault("reward 0", "score", 0, Kind.TWICE))
    deadly = Fault("server 1", "generate_all", 0, Kind.DIES_BEFORE)
    bug = BUGS["the samples of a lost slot are never generated again"]
    large = World(num_replicas=3, num_prompts=3, num_batches=2, num_rewards=2, faults=(*needless, deadly))
    with planted(bug):
        small = shrink(simulate(large))
    assert small.problems and small.world == World(faults=(deadly,))


# -- the virtual clock, the processes on it, and that a run is a function of its world -----------------------
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
