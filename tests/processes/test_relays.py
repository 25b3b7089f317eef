# SPDX-License-Identifier: Apache-2.0
"""Relays: the tree that is planned, and calls through it to real Ray actors."""

import asyncio
import random
from math import ceil, sqrt
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from tests.trainer import mortal
from tests.trainer.ended import kill
from verl_digen.processes.relays import FAN_OUT, Process, Relayed, Together, Work, ranks_of, relayed

pytestmark = pytest.mark.slow


def plan(nodes, fan_out=FAN_OUT):
    """Callees of the driver: numbers of processes, and relays as (node, callees)."""
    return relayed(range(len(nodes)), nodes, start=lambda node, callees: (node, callees), fan_out=fan_out).callees


def leaves(callees):
    return [rank for callee in callees for rank in ([callee] if isinstance(callee, int) else leaves(callee[1]))]


def assert_invariants(nodes, fan_out):
    callees = plan(nodes, fan_out)
    assert leaves(callees) == list(range(len(nodes))), "every rank once, in order"

    def check(callees):
        assert len(callees) <= max(fan_out, ceil(sqrt(len(nodes))))
        for node, below in (callee for callee in callees if not isinstance(callee, int)):
            assert node == nodes[leaves(below)[0]]
            if isinstance(below[0], int):
                assert {nodes[rank] for rank in below} == {node}, "a rank is called from its own node"
            check(below)

    check(callees)


def test_few_ranks_have_no_relay():
    assert [*plan(["a"] * 8 + ["b"] * 8)] == [*range(16)] and FAN_OUT == 16


def test_a_node_has_a_relay_and_many_relays_have_relays():
    callees = plan([f"n{rank // 8:02d}" for rank in range(640)])
    assert [len(below) for _, below in callees] == [*[9] * 8, 8], "none calls many others"
    assert [*callees[0][1][8][1]] == [*range(64, 72)] and callees[0][1][8][0] == "n08"


def test_a_tree_of_any_nodes_calls_every_rank_once_and_none_from_another_node():
    draw = random.Random(0)
    for _ in range(200):
        nodes = [f"n{number}" for number in range(draw.randint(1, 60)) for _ in range(draw.randint(1, 9))]
        if draw.random() < 0.3:
            draw.shuffle(nodes)  # as with ranks whose nodes alternate
        assert_invariants(nodes, draw.randint(2, 16))


def answers_of(callee, method, args, keep, **more):
    """The answers, or the exception."""

    async def ask():
        return await asyncio.wait_for(callee.call(Work(method, args, **more), keep), 60.0)

    try:
        return asyncio.run(ask())
    except Exception as error:
        return error


@pytest.fixture(scope="module")
def actors(ray_cluster):
    """Five processes of versions 0 to 4, under the prefix of no role."""
    found = [ray.remote(mortal.Process).options(num_cpus=0).remote() for _ in range(5)]
    ray.get([actor.take.remote(version) for version, actor in enumerate(found)])
    return found


@pytest.fixture(scope="module")
def ways(actors):
    """Ranks that are called directly, and behind relays of relays."""
    ranks = [Process(actor) for actor in actors]
    here = ray.get_runtime_context().get_node_id()
    way = relayed(ranks, [here] * 5, fan_out=2)
    assert [callee.num_processes for callee in way.callees] == [4, 1], "two levels"
    assert all(isinstance(callee, Relayed) for callee in way.callees)
    return Together(ranks), way


def test_answers_come_in_the_order_of_the_ranks_or_from_the_first_alone(ways):
    for way in ways:
        assert answers_of(way, "version_now", (), "all") == [0, 1, 2, 3, 4]
        assert answers_of(way, "version_now", (), "first") == [0]


def test_a_reference_is_resolved_by_the_rank(ways, actors):
    for way in ways:
        assert isinstance(answers_of(way, "refuse", (ray.put(3),), "first"), ValueError)


def test_each_process_gets_its_own_arguments(ways):
    for way in ways:
        kwargs_of = [{"version": version} for version in (9, 9, 9, 3, 9)]
        outcomes = answers_of(way, "refuse", (), "outcomes", kwargs_of=kwargs_of)
        assert [isinstance(outcome, ValueError) for outcome in outcomes] == [False, False, False, True, False]


def test_an_exception_is_the_same_through_relays(ways):
    direct, through = (answers_of(way, "refuse", (4,), "first") for way in ways)
    for error in (direct, through):
        assert isinstance(error, ValueError) and isinstance(error, RayTaskError)
        assert "version 4 is refused" in str(error)
    assert str(direct) == str(through), "Ray's text of a relay is not wrapped around that of the rank"


def test_outcomes_have_the_exception_in_place_of_the_rank_that_failed(ways):
    for way in ways:
        outcomes = answers_of(way, "refuse", (2,), "outcomes")
        assert [type(outcome) for outcome in outcomes if outcome is not None] == [type(outcomes[2])]
        assert isinstance(outcomes[2], ValueError) and len(outcomes) == 5


def test_few_ranks_are_called_under_the_prefix_of_their_role(actors):
    bound = type("actor_begin", (), {})()  # verl names the class of a bound method by what is called on the actor
    ranks = ranks_of(SimpleNamespace(begin=bound, workers=actors), answer_s=10.0)
    assert ranks.callees == [Process(actor, "actor_") for actor in actors]


def test_a_rank_that_dies_and_a_relay_that_dies_end_the_call_at_once(ways, actors):
    _, way_through = ways
    kill(actors[1])
    for way in ways:
        assert isinstance(answers_of(way, "version_now", (), "first"), RayActorError)
    dead = [isinstance(one, RayActorError) for one in answers_of(way_through, "version_now", (), "outcomes")]
    assert dead == [False, True, False, False, False]
    kill(way_through.callees[0].relay)
    assert isinstance(answers_of(way_through, "version_now", (), "all"), RayActorError)
    dead = [isinstance(one, RayActorError) for one in answers_of(way_through, "version_now", (), "outcomes")]
    assert dead == [True, True, True, True, False]
