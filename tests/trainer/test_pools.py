# SPDX-License-Identifier: Apache-2.0
"""An assist through the generator pool: one call of the ranks, an answer for each group. Ray's calls are coroutines."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from ray.exceptions import ActorDiedError

from tests.trainer.direct import Direct, as_it_is
from verl_digen.agent_loop.chunks import ChunkOrder, GeneratedChunk
from verl_digen.observe.timeline.interval import Lane
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.schedulers.types import Chunk
from verl_digen.trainer.pools import GeneratorPool
from verl_digen.trainer.timelines import Joining
from verl_digen.trainer.updates import TrainerRanks
from verl_digen.types import PromptRow

REFUSED = "p2"


class Remote:
    """A method whose calls are coroutines, as those of an actor's handle are awaited."""

    def __init__(self, method: Any):
        self.remote = method


class Worker:
    """Agent loop worker: a request is (uid, sample), a sample its own request."""

    def __init__(self, encoded: Counter[str]):
        self.encoded = encoded
        self.prepare_assist, self.adopt_chunk = Remote(self._prepare), Remote(self._adopt)
        self.generate_chunk = Remote(self._generate)

    async def _generate(self, order: ChunkOrder, server: Any) -> GeneratedChunk:
        return GeneratedChunk(dict.fromkeys(order.samples, f"{server} died"), is_slot_lost=True)

    async def _prepare(self, order: ChunkOrder, server: str | None) -> tuple[Any, ...]:
        if order.uid == REFUSED:
            raise ValueError("too many tokens")
        if server is not None:
            self.encoded[server] += 1
        return tuple((order.uid, index) for index in order.samples)

    async def _adopt(self, order: ChunkOrder, parts: Any, failure: str) -> GeneratedChunk:
        found = [one for part in parts for one in part]
        assert {uid for uid, _ in found} <= {order.uid}, "samples of other groups do not travel to this worker"
        missing = set(order.samples) - {index for _, index in found}
        assert len(found) + len(missing) == len(order.samples)
        return GeneratedChunk(dict.fromkeys(sorted(missing), failure), is_slot_lost=False)


class Ranks:
    """Two ranks that share the requests."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def assist(self, requests: tuple[Any, ...], version: int) -> list[Any]:
        self.calls.append(requests)

        async def answer(rank: int) -> list[tuple[str, Any]]:
            share = requests[rank::2]
            return [(uid, [one for one in share if one[0] == uid]) for uid in dict(share)]

        return [answer(0), answer(1)]


def make_pool(worker: Worker, ranks: Any, num_prompts: int) -> GeneratorPool:
    nothing: Any = None
    pool = GeneratorPool(
        [worker],
        TrainerRanks(Direct(ranks), put=as_it_is),
        end_replica=nothing,
        condition_key=lambda row: row.text,
        deadlines=DeadlinesConfig(),
    )
    for number in range(2):
        pool.join(replica_of(f"server {number}", number))
    for number in range(num_prompts):
        pool.add_prompt(0, PromptRow(f"prompt {number}", "", None, uid=f"p{number}"))
    return pool


def replica_of(server: Any, number: int) -> Joining:
    return Joining(f"r{number}", server, Lane("generator", number, "here", 1), [f"s{number}"])


def assist(*sizes: int, first: int = 0) -> tuple[list[GeneratedChunk], Ranks, Counter[str]]:
    """Assist with groups of these many samples; `first` is the number of the first of them."""
    encoded: Counter[str] = Counter()
    ranks = Ranks()
    pool = make_pool(Worker(encoded), ranks, first + len(sizes))
    chunks = [Chunk(number, 0, f"p{number}", tuple(range(size)), 0) for number, size in enumerate(sizes, first)]
    return list(asyncio.run(pool.assist(chunks))), ranks, encoded


def test_the_ranks_get_one_call_for_all_groups_and_each_group_gets_its_own_samples():
    answers, ranks, encoded = assist(3, 2)
    assert [answer.failures for answer in answers] == [{}, {}]
    assert ranks.calls == [(("p0", 0), ("p0", 1), ("p0", 2), ("p1", 0), ("p1", 1))]
    assert encoded == {"server 0": 1, "server 1": 1}, "the replicas share the encoding"


def test_a_prompt_that_the_encoder_refuses_leaves_the_other_groups():
    answers, ranks, _ = assist(1, 2, 4)
    assert [dict(answer.failures) for answer in answers[:2]] == [{}, {}]
    assert sorted(answers[2].failures) == [0, 1, 2, 3] and "too many tokens" in answers[2].failures[0]
    assert ranks.calls == [(("p0", 0), ("p1", 0), ("p1", 1))]


def test_no_rank_is_called_when_every_prompt_is_refused():
    (answer,), ranks, _ = assist(2, first=2)
    assert sorted(answer.failures) == [0, 1] and not ranks.calls


class Dead:
    """Server whose calls raise."""

    def __init__(self) -> None:
        self.activate_weights = Remote(self._raise)

    async def _raise(self) -> int:
        raise ActorDiedError


def test_calls_that_begin_after_another_slot_of_the_replica_reported_its_loss_report_it_too():
    pool = make_pool(Worker(Counter()), None, 1)
    replica = replica_of(Dead(), 2)
    pool.join(replica)
    pool.leave(replica)
    assert asyncio.run(pool.generate("s2", Chunk(0, 0, "p0", (0, 1), 0))).is_slot_lost
    assert asyncio.run(pool.load(["s2"])) is None


def test_a_replica_that_left_encodes_no_prompt_and_one_that_joins_again_does():
    encoded: Counter[str] = Counter()
    pool = make_pool(Worker(encoded), Ranks(), 4)
    gone, again = pool.replicas["s0"], replica_of("server 0", 0)
    pool.leave(gone)
    asyncio.run(pool.assist([Chunk(0, 0, "p0", (0,), 0)]))
    assert encoded == {"server 1": 1}
    pool.join(again)
    pool.leave(gone)
    asyncio.run(pool.assist([Chunk(1, 0, "p1", (0,), 0), Chunk(2, 0, "p3", (0,), 0)]))
    assert encoded["server 0"] == 1
