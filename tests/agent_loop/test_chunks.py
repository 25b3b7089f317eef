# SPDX-License-Identifier: Apache-2.0
"""Chunks with fake functions for replicas, reward workers and TransferQueue."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from tests.tags import make_tag
from verl_digen.agent_loop.chunks import ChunkOrder, ChunkWorker
from verl_digen.agent_loop.manager import start_workers
from verl_digen.config import DigenConfig
from verl_digen.errors import RunStopped
from verl_digen.processes.actors import MAX_CALLS
from verl_digen.types import PromptRow

ORDER = ChunkOrder(chunk_id=7, samples=(0, 1, 2), row=PromptRow("a cat", "test", None, uid="p0"), step=1)


class Server:
    """The handle of a replica that is asked to cancel samples."""

    def __init__(self, error=None):
        self.withdrawn, self._error = [], error
        self.abort_request = SimpleNamespace(remote=self._abort)

    async def _abort(self, name):
        self.withdrawn.append(name)
        if self._error is not None:
            raise self._error


def runner_of(generate=None, score=None, publish=None, on_settled=lambda uid, samples: None):
    """A worker that generates by (index), scores by (sample), publishes rewards, and is told of settled samples."""

    async def finish(generated, row, step, *, validate):
        reward = await score(getattr(generated, "index", generated))
        return SimpleNamespace(tag=make_tag(reward))

    async def publish_rows(samples, step):
        await publish([sample.tag.reward for sample in samples])

    worker = ChunkWorker()
    vars(worker).update(digen=DigenConfig(), _generating={}, _scoring={}, _burst_of=lambda order: None)
    vars(worker).update(_finish=finish, _publish_rows=publish_rows, _rewards=SimpleNamespace(settled=on_settled))
    vars(worker).update(_generate=lambda client, row, index, step, validate: generate(index))
    return worker


async def no_rows(rewards):
    pass


def adopted(*indices):
    """References to samples that a rank of the trainer generated."""

    async def of_rank():
        facts = [SimpleNamespace(sample_index=index) for index in indices]
        return [SimpleNamespace(trajectory=SimpleNamespace(facts=one), index=one.sample_index) for one in facts]

    return [of_rank()]


def run_chunk(*, generating=None, scoring=None):
    """Pass a chunk of three samples through a runner -> (generated, scored, published, the runner).

    Args:
        generating, scoring: sample index -> exception raised for it.
    """
    published = []

    async def generate(index):
        if generating and index in generating:
            raise generating[index]
        return index

    async def score(index):
        if scoring and index in scoring:
            raise scoring[index]
        return index / 10

    async def publish(rewards):
        published.extend(rewards)

    async def run():
        generated = await runner.generate_chunk(ORDER, Server())
        return generated, None if generated.is_slot_lost else await runner.collect_chunk(ORDER.chunk_id)

    runner = runner_of(generate, score=score, publish=publish)
    return *asyncio.run(run()), published, runner


@pytest.mark.parametrize("error", [None, RayActorError()], ids=["alive", "lost"])
async def test_a_cancelled_chunk_tells_its_replica_and_ends_with_failures_also_where_it_waits_for_an_environment(error):
    async def generate(index):
        await asyncio.Event().wait()

    runner, server = runner_of(generate), Server(error)
    waiting = asyncio.ensure_future(runner.generate_chunk(ORDER, server))
    await asyncio.sleep(0)
    await runner.cancel_chunk(ORDER.chunk_id)
    generated = await waiting
    await runner.cancel_chunk(ORDER.chunk_id)
    scored = await runner.collect_chunk(ORDER.chunk_id)
    assert server.withdrawn == [f"p0_{index}" for index in range(3)]
    assert generated.failures == dict.fromkeys(range(3), "it was withdrawn")
    assert not generated.is_slot_lost and not scored.tags


async def test_a_cancelled_chunk_does_not_wait_for_scores_that_wait_for_samples_nobody_generates():
    async def generate(index):
        return index

    async def score(index):
        await asyncio.Event().wait()  # for the others of its group

    runner = runner_of(generate, score=score)
    await runner.generate_chunk(ORDER, Server())
    collected = asyncio.ensure_future(runner.collect_chunk(ORDER.chunk_id))
    await asyncio.sleep(0)
    await runner.cancel_chunk(ORDER.chunk_id)
    scored = await asyncio.wait_for(collected, 60.0)
    assert not scored.tags and sorted(scored.failures) == [0, 1, 2]


async def test_samples_that_somebody_else_generated_are_scored_and_published_too():
    async def score(index):
        return index / 10

    runner = runner_of(score=score, publish=no_rows)
    taken = await runner.adopt_chunk(ORDER, adopted(0, 2), "the encoder refused")
    scored = await runner.collect_chunk(ORDER.chunk_id)
    assert taken.failures == {1: "the encoder refused"}
    assert scored.tags == {0: make_tag(0.0), 2: make_tag(0.2)}


def test_a_sample_that_fails_takes_no_other_with_it():
    generated, scored, published, _ = run_chunk(
        generating={0: ValueError("prompt too long")}, scoring={2: ConnectionError("down")}
    )
    assert generated.failures == {0: "ValueError: prompt too long"} and not generated.is_slot_lost
    assert scored.failures == {2: "ConnectionError: down"}
    assert scored.tags == {1: make_tag(0.1)} and published == [0.1]


def test_of_a_replica_that_died_nothing_is_published_or_kept():
    generated, _, published, runner = run_chunk(generating={1: RayActorError()})
    assert generated.is_slot_lost
    assert published == [] and runner._scoring == {}


@pytest.mark.parametrize("where", ["generating", "scoring"])
def test_what_nobody_could_do_better_ends_the_run(where):
    with pytest.raises(RunStopped, match="all reward workers"):
        run_chunk(**{where: {1: RunStopped("all reward workers are lost")}})


async def test_of_a_discarded_chunk_nothing_is_scored_or_published_from_then_on():
    scored = []
    first, rest = asyncio.Event(), asyncio.Event()

    async def generate(index):
        await (first if index == 0 else rest).wait()
        return index

    async def score(index):
        scored.append(index)
        await asyncio.Event().wait()

    runner = runner_of(generate, score=score)
    generating = asyncio.ensure_future(runner.generate_chunk(ORDER, Server()))
    first.set()
    while not scored:
        await asyncio.sleep(0)
    (scoring,) = runner._scoring[ORDER.chunk_id][1].values()
    await runner.discard_chunk(ORDER.chunk_id)
    rest.set()
    generated = await generating
    assert scoring.cancelled() and not runner._scoring
    await runner.discard_chunk(ORDER.chunk_id)
    assert generated.failures == {} and scored == [0]


async def test_a_chunk_discarded_while_it_is_collected_is_not_published():
    async def score(index):
        await asyncio.Event().wait()

    async def publish(rewards):
        raise AssertionError("published")

    runner = runner_of(score=score, publish=publish)
    await runner.adopt_chunk(ORDER, adopted(0))
    collecting = asyncio.ensure_future(runner.collect_chunk(ORDER.chunk_id))
    await asyncio.sleep(0)
    await runner.discard_chunk(ORDER.chunk_id)
    (outcome,) = await asyncio.gather(collecting, return_exceptions=True)
    assert isinstance(outcome, KeyError)


async def test_a_chunk_is_settled_once_its_outcome_is_there_or_it_is_discarded_and_not_before():
    settled = []

    async def score(index):
        assert settled == []
        raise RuntimeError("no score")

    runner = runner_of(score=score, on_settled=lambda uid, samples: settled.append((uid, samples)))
    await runner.adopt_chunk(ORDER, adopted(0, 1))
    await runner.collect_chunk(ORDER.chunk_id)
    assert settled == [("p0", (0, 1, 2))]
    await runner.adopt_chunk(ORDER, [])
    await runner.discard_chunk(ORDER.chunk_id)
    await runner.discard_chunk(ORDER.chunk_id)
    assert settled == [("p0", (0, 1, 2))] * 2


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
