# SPDX-License-Identifier: Apache-2.0
"""Chunks with fake functions for replicas, reward workers and TransferQueue."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from tests.tags import make_tag
from verl_digen.agent_loop.chunks import ChunkOrder, ChunkRunner
from verl_digen.agent_loop.manager import start_workers
from verl_digen.errors import RunStopped
from verl_digen.processes.actors import MAX_CALLS
from verl_digen.types import PromptRow

ORDER = ChunkOrder(chunk_id=7, samples=(0, 1, 2), row=PromptRow("a cat", "test", None, uid="p0"), step=1)


async def withdraw(order, index, server):
    raise AssertionError("nobody withdrew anything")


def runner_of(generate=None, withdraw=withdraw, score=None, publish=None, on_settled=lambda order: None):
    """A runner of a worker with these methods."""
    named = {"generate_sample": generate, "withdraw_sample": withdraw, "score_sample": score}
    return ChunkRunner(SimpleNamespace(**named, publish_chunk=publish, on_settled=on_settled))


def run_chunk(*, generating=None, scoring=None):
    """Pass a chunk of three samples through a runner -> (generated, scored, published, the runner).

    Args:
        generating, scoring: sample index -> exception raised for it.
    """
    published = {}

    async def generate(order, index, server):
        if generating and index in generating:
            raise generating[index]
        return index

    async def score(order, index):
        if scoring and index in scoring:
            raise scoring[index]
        return index / 10

    async def publish(order, scored):
        published.update(scored)
        return {index: make_tag(reward) for index, reward in scored.items()}

    async def run():
        generated = await runner.generate(ORDER, "server")
        return generated, None if generated.is_slot_lost else await runner.collect(ORDER.chunk_id)

    runner = runner_of(generate, score=score, publish=publish)
    return *asyncio.run(run()), published, runner


async def test_a_cancelled_chunk_tells_its_replica_and_ends_with_failures_also_where_it_waits_for_an_environment():
    withdrawn = []

    async def generate(order, index, server):
        await asyncio.Event().wait()

    async def withdraw(order, index, server):
        withdrawn.append((order.uid, index, server))

    runner = runner_of(generate, withdraw)
    waiting = asyncio.ensure_future(runner.generate(ORDER, "server"))
    await asyncio.sleep(0)
    await runner.cancel(ORDER.chunk_id)
    generated = await waiting
    await runner.cancel(ORDER.chunk_id)
    scored = await runner.collect(ORDER.chunk_id)
    assert withdrawn == [("p0", index, "server") for index in range(3)]
    assert generated.failures == dict.fromkeys(range(3), "it was withdrawn")
    assert not generated.is_slot_lost and not scored.tags


async def test_a_cancelled_chunk_does_not_wait_for_scores_that_wait_for_samples_nobody_generates():
    async def generate(order, index, server):
        return index

    async def score(order, index):
        await asyncio.Event().wait()  # for the others of its group

    runner = runner_of(generate, score=score)
    await runner.generate(ORDER, "server")
    collected = asyncio.ensure_future(runner.collect(ORDER.chunk_id))
    await asyncio.sleep(0)
    await runner.cancel(ORDER.chunk_id)
    scored = await asyncio.wait_for(collected, 60.0)
    assert not scored.tags and sorted(scored.failures) == [0, 1, 2]


async def test_samples_that_somebody_else_generated_are_scored_and_published_too():
    async def score(order, generated):
        return generated / 10

    async def publish(order, scored):
        return {index: make_tag(reward) for index, reward in scored.items()}

    runner = runner_of(score=score, publish=publish)
    adopted = runner.adopt(ORDER, {0: 0, 2: 2}, "the encoder refused")
    scored = await runner.collect(ORDER.chunk_id)
    assert adopted.failures == {1: "the encoder refused"}
    assert scored.tags == {0: make_tag(0.0), 2: make_tag(0.2)}


def test_a_sample_that_fails_takes_no_other_with_it():
    generated, scored, published, _ = run_chunk(
        generating={0: ValueError("prompt too long")}, scoring={2: ConnectionError("down")}
    )
    assert generated.failures == {0: "ValueError: prompt too long"} and not generated.is_slot_lost
    assert scored.failures == {2: "ConnectionError: down"}
    assert scored.tags == {1: make_tag(0.1)} and published == {1: 0.1}


def test_of_a_replica_that_died_nothing_is_published_or_kept():
    generated, _, published, runner = run_chunk(generating={1: RayActorError()})
    assert generated.is_slot_lost
    assert published == {} and runner._scoring == {}


@pytest.mark.parametrize("where", ["generating", "scoring"])
def test_what_nobody_could_do_better_ends_the_run(where):
    with pytest.raises(RunStopped, match="all reward workers"):
        run_chunk(**{where: {1: RunStopped("all reward workers are lost")}})


async def test_of_a_discarded_chunk_nothing_is_scored_or_published_from_then_on():
    scored = []
    first, rest = asyncio.Event(), asyncio.Event()

    async def generate(order, index, server):
        await (first if index == 0 else rest).wait()
        return index

    async def score(order, index):
        scored.append(index)
        await asyncio.Event().wait()

    runner = runner_of(generate, score=score)
    generating = asyncio.ensure_future(runner.generate(ORDER, "server"))
    first.set()
    while not scored:
        await asyncio.sleep(0)
    (scoring,) = runner._scoring[ORDER.chunk_id][1].values()
    runner.discard(ORDER.chunk_id)
    rest.set()
    generated = await generating
    assert scoring.cancelled() and not runner._scoring
    runner.discard(ORDER.chunk_id)
    assert generated.failures == {} and scored == [0]


async def test_a_chunk_discarded_while_it_is_collected_is_not_published():
    async def score(order, index):
        await asyncio.Event().wait()

    async def publish(order, scored):
        raise AssertionError("published")

    runner = runner_of(score=score, publish=publish)
    runner.adopt(ORDER, {0: 0})
    collecting = asyncio.ensure_future(runner.collect(ORDER.chunk_id))
    await asyncio.sleep(0)
    runner.discard(ORDER.chunk_id)
    (outcome,) = await asyncio.gather(collecting, return_exceptions=True)
    assert isinstance(outcome, KeyError)


async def test_a_chunk_is_settled_once_its_outcome_is_there_or_it_is_discarded_and_not_before():
    settled = []

    async def score(order, index):
        assert settled == []
        raise RuntimeError("no score")

    runner = runner_of(score=score, on_settled=settled.append)
    runner.adopt(ORDER, {0: 0, 1: 1})
    await runner.collect(ORDER.chunk_id)
    assert settled == [ORDER]
    runner.adopt(ORDER, {})
    runner.discard(ORDER.chunk_id)
    runner.discard(ORDER.chunk_id)
    assert settled == [ORDER, ORDER]


def test_an_agent_loop_worker_answers_a_sign_of_life_beside_thousands_of_chunks(monkeypatch):
    """Ray lets a call wait until one of the actor's `max_concurrency` has ended."""
    started = []

    class Actor:
        def options(self, **given):
            started.append(given)
            return self

        def remote(self):
            return None

    node = {"NodeID": "00" * 28, "Alive": True, "Resources": {"CPU": 8.0}}
    monkeypatch.setattr("ray.remote", lambda actor_class: Actor())
    monkeypatch.setattr("ray.nodes", lambda: [node])
    start_workers(2)
    assert [given["max_concurrency"] for given in started] == [MAX_CALLS] * 2 and MAX_CALLS > 10_000
