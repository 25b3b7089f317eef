# SPDX-License-Identifier: Apache-2.0
"""Relays: the tree that is planned, and calls through it to real Ray actors."""

import asyncio
import random
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from tests.trainer import mortal
from tests.trainer.ended import kill
from verl_digen.processes.relays import FAN_OUT, Branch, Process, Relayed, Together, Work, ranks_of, start_relays, tree

pytestmark = pytest.mark.slow


def leaves(callees):
    return [rank for callee in callees for rank in ([callee] if isinstance(callee, int) else leaves(callee.callees))]


def assert_invariants(nodes, fan_out):
    callees = tree(nodes, fan_out)
    assert leaves(callees) == list(range(len(nodes))), "every rank once, in order"

    def check(callees):
        assert len(callees) <= fan_out
        for branch in callees:
            if isinstance(branch, Branch):
                below = leaves([branch])
                assert branch.node == nodes[below[0]]
                if isinstance(branch.callees[0], int):
                    assert {nodes[rank] for rank in below} == {branch.node}, "a rank is called from its own node"
                check(branch.callees)

    check(callees)


def test_few_ranks_have_no_relay():
    assert tree(["a"] * 8 + ["b"] * 8) == tuple(range(16)) and FAN_OUT == 16


def test_a_node_has_a_relay_and_many_relays_have_relays():
    nodes = [f"n{rank // 8:02d}" for rank in range(640)]
    callees = tree(nodes)
    assert [len(branch.callees) for branch in callees] == [8, *[9] * 8], "as few levels as with 16, and no wide one"
    assert callees[1].callees[0] == Branch("n08", tuple(range(64, 72)))


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
    relayed = start_relays(tree([here] * 5, fan_out=2), ranks)
    assert [callee.num_processes for callee in relayed.callees] == [1, 4], "two levels"
    assert all(isinstance(callee, Relayed) for callee in relayed.callees)
    return Together(ranks), relayed


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
    direct, relayed = (answers_of(way, "refuse", (4,), "first") for way in ways)
    for error in (direct, relayed):
        assert isinstance(error, ValueError) and isinstance(error, RayTaskError)
        assert "version 4 is refused" in str(error)
    assert str(direct) == str(relayed), "Ray's text of a relay is not wrapped around that of the rank"


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
    _, relayed = ways
    kill(actors[1])
    for way in ways:
        assert isinstance(answers_of(way, "version_now", (), "first"), RayActorError)
    dead = [isinstance(one, RayActorError) for one in answers_of(relayed, "version_now", (), "outcomes")]
    assert dead == [False, True, False, False, False]
    kill(relayed.callees[1].relay)
    assert isinstance(answers_of(relayed, "version_now", (), "all"), RayActorError)
    dead = [isinstance(one, RayActorError) for one in answers_of(relayed, "version_now", (), "outcomes")]
    assert dead == [False, True, True, True, True]
