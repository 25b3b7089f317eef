# SPDX-License-Identifier: Apache-2.0
"""The server's methods over a fake engine: faults of the engine, and which adapter a request names."""

import asyncio
import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm_omni.entrypoints.async_omni import AsyncOmni

from tests.chaos.loop import run_in_virtual_time
from tests.tags import make_facts
from tests.vllm_omni.conftest import RUN_SEED, request
from verl_digen.config import DigenConfig
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.rollout.vllm_omni.recorder import RECORDED
from verl_digen.rollout.vllm_omni.requests import ORDER, START, Published, Taken
from verl_digen.rollout.vllm_omni.server import vLLMOmniHttpServer, vLLMOmniHttpServerBase
from verl_digen.sampling.outputs import ImageOutput
from verl_digen.types import Generation, PathRecord, Trajectory
from verl_digen.weights.checksum import Manifest

PATH, STEPS, SIGMAS = (
    torch.tensor([[4.0, 0.0], [2.0, 2.0], [2.0, 2.0]]),
    torch.arange(2),
    torch.tensor([1.0, 0.5, 0.25]),
)
"""Latents of two steps: the first moves x by (-2, 2), the second does not move it."""


class Left(BaseException):
    """Raised in place of exiting the process."""


class Server(vLLMOmniHttpServer):
    """Server that raises `Left` instead of exiting."""

    def _leave(self, reason):
        raise Left(reason)


class Engine:
    """Fake engine: answers every request with a record once allowed; records its calls."""

    def __init__(self):
        self.adapters = []
        self.version = 0
        self.sealed = START
        self.calls = []
        self.error: Exception | None = None
        self.is_dead = False
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.has_begun = asyncio.Event()
        self.acks = [SimpleNamespace(status="SUCCESS")]

    async def generate(self, prompt, *, request_id, sampling_params_list):
        self.adapters.append(sampling_params_list[0].lora_request)
        self.has_begun.set()
        await self.may_finish.wait()
        if self.error is not None:
            raise self.error
        order = sampling_params_list[0].extra_args[ORDER]
        one = torch.zeros(1)
        asked = order.request
        path = PathRecord(PATH, STEPS, SIGMAS[:2], SIGMAS[1:], one, one)
        trajectory = Trajectory(make_facts(asked.uid, version=self.version, num_steps=2, sampling=asked.sampling), path)
        record = {"error": None, "generation": Generation(trajectory, one, started_s=0.0, ended_s=1.0)}
        yield SimpleNamespace(multimodal_output={"trajectory": {RECORDED: record}})

    async def check_health(self):
        if self.is_dead:
            raise RuntimeError("worker died")

    async def collective_rpc(self, method, args=()):
        self.calls.append((method, args))
        await asyncio.sleep(0)
        if method == "seal_weights":
            self.sealed = args[1]
        elif method == "commit_weights":
            return (self.taken(self.sealed),)
        elif method == "commit_adapter":
            return (self.taken(args[2]),)
        return ([None],)

    def taken(self, published):
        return [Taken(published, sent=published.serial, held=published.serial, load_s=0.0)]

    async def sleep(self, level):
        self.calls.append(("sleep", level))
        return self.acks

    async def wake_up(self):
        return self.acks


def make_server(engine, *, sends_adapter=False, first_s=60.0, check_prompt=lambda text: None) -> Any:
    server: Any = Server.__new__(Server)
    server.engine = engine
    server.replica_rank = 0
    server.rollout_mode = None
    server.config = SimpleNamespace(free_cache_engine=True)
    server.digen = DigenConfig(seed=RUN_SEED, deadlines=DeadlinesConfig(first_s=first_s))
    server._check_prompt = check_prompt
    server._takes_images = False
    server._latents_dtype = torch.float32
    server._model = SimpleNamespace(
        experts=("transformer",),
        expert_of=lambda sigmas: torch.zeros(len(sigmas), dtype=torch.int64),
        sigmas=lambda num_steps, geometry: torch.linspace(1.0, 0.0, num_steps + 1),
    )
    server._sends_adapter = sends_adapter
    server._init_state()
    return server


def generate(server, number=0):
    asked = request(number)
    return server.generate(f"{asked.uid}_{asked.sample_index}", [], {"request": asked})


def test_the_fake_engine_has_vllm_omnis_methods():
    for name in ("generate", "check_health", "collective_rpc", "sleep", "wake_up"):
        assert hasattr(AsyncOmni, name)


def test_every_rank_watches_an_update_to_its_end_also_if_it_sends_before_the_leader_begins():
    async def run():
        server = make_server(Engine())
        for version in (1, 2):
            early = asyncio.create_task(server.until_update_ends())
            await asyncio.sleep(0)
            await server.begin_update("sockets", use_shm=True, is_live=False, update_id=uuid4().hex)
            late = asyncio.create_task(server.until_update_ends())
            await asyncio.sleep(0)
            assert not early.done() and not late.done()
            await server.seal_update(Manifest(version, num_tensors=1, checksum=0), None)
            await asyncio.gather(early, late)

    asyncio.run(run())


def test_a_replica_leaves_when_a_request_fails_because_its_engine_is_dead():
    async def run():
        engine = Engine()
        engine.error, engine.is_dead = RuntimeError("Engine core died"), True
        await generate(make_server(engine))

    with pytest.raises(Left, match="its engine is dead: worker died"):
        asyncio.run(run())


def test_a_request_that_fails_in_an_engine_that_lives_fails_alone():
    async def run():
        engine = Engine()
        server = make_server(engine)
        engine.error = RuntimeError("out of memory")
        with pytest.raises(RuntimeError, match="vLLM-Omni failed sample p0_0 on replica 0: out of memory"):
            await generate(server)
        engine.error = None
        assert (await generate(server)).trajectory.facts.uid == "p0"
        assert server._in_flight.total() == 0

    asyncio.run(run())


def test_a_replica_leaves_when_a_request_takes_longer_than_its_limit():
    async def run():
        engine = Engine()
        engine.may_finish.clear()
        await generate(make_server(engine, first_s=0.05))

    with pytest.raises(Left, match=r"neither sample p0_0 nor any other ended for digen\.deadlines\.first_s=0\.05 s"):
        asyncio.run(run())


def test_a_request_at_the_end_of_a_long_queue_is_waited_for_while_others_end():
    class Queue(Engine):
        async def generate(self, prompt, **arguments):
            self.calls.append(prompt)
            await asyncio.sleep(90.0 * len(self.calls))
            async for output in super().generate(prompt, **arguments):
                yield output

    async def run():
        server = make_server(Queue(), first_s=100.0)
        await asyncio.gather(*(generate(server, number) for number in range(3)))

    run_in_virtual_time(run())


def test_a_prompt_that_the_encoder_refuses_never_reaches_the_engine():
    def refuse(text):
        raise ValueError("2000 tokens, the encoder reads 512")

    async def run():
        engine = Engine()
        with pytest.raises(ValueError, match="the encoder reads 512"):
            await generate(make_server(engine, check_prompt=refuse))
        assert not engine.adapters

    asyncio.run(run())


def test_a_text_is_generated_by_the_rfcs_call_and_answered_by_its_names():
    async def run():
        server = make_server(Engine())
        found = await server.generate("r0", "a cat", {"num_steps": 4, "sample_index": 0})
        assert isinstance(found, ImageOutput) and found.trajectory.facts.uid == "r0"
        assert found.trajectory.facts.sampling.num_steps == 4 and found.latent_samples is PATH
        assert found.image is found.pixels and found.prompt_embeddings is None, "the fake engine encodes nothing"
        assert type(await generate(server)) is Generation, "the project's own client"
        with pytest.raises(ValueError, match="a prompt must be a text, got list; a pipeline encodes it itself"):
            await server.generate("r0", [1, 2])

    assert vLLMOmniHttpServerBase is vLLMOmniHttpServer and issubclass(vLLMOmniHttpServer, vLLMHttpServer)
    assert list(inspect.signature(vLLMOmniHttpServer.generate).parameters)[1:4] == [
        *("request_id", "prompt_ids", "sampling_params")
    ]
    asyncio.run(run())


def test_two_updates_of_one_version_are_two_adapters_and_each_request_keeps_its_own():
    async def run():
        engine = Engine()
        server = make_server(engine, sends_adapter=True)
        engine.may_finish.clear()
        config: Any = object()
        await server.commit_update(Manifest(7, 1, 0), config)
        current = asyncio.ensure_future(generate(server))
        await asyncio.wait_for(engine.has_begun.wait(), 30)
        await server.begin_update("sockets", use_shm=True, is_live=False, update_id=uuid4().hex)
        await server.commit_update(Manifest(7, 1, 0), config)
        engine.has_begun.clear()
        average = asyncio.ensure_future(generate(server))
        await asyncio.wait_for(engine.has_begun.wait(), 30)
        await server.commit_update(Manifest(8, 1, 0), config)
        first, second = engine.adapters
        assert first.lora_int_id != second.lora_int_id
        of_first, of_second, of_third = (args for method, args in engine.calls if method == "commit_adapter")
        assert of_first[2:] == (Published(2, 7), {START.serial})
        assert of_second[2:] == (Published(3, 7), {2})
        assert of_third[2:] == (Published(4, 8), {2, 3}), "adapters of requests in flight are kept"
        engine.may_finish.set()
        await asyncio.gather(current, average)
        assert server.global_steps == 8

    asyncio.run(run())


def test_an_adapter_waits_for_room_until_a_request_that_uses_another_ends():
    async def run():
        engine = Engine()
        server = make_server(engine, sends_adapter=True)
        server.digen = replace(server.digen, rollout=replace(server.digen.rollout, num_kept_adapters=2))
        engine.may_finish.clear()
        config: Any = object()
        await server.commit_update(Manifest(1, 1, 0), config)
        running = asyncio.ensure_future(generate(server))
        await asyncio.wait_for(engine.has_begun.wait(), 30)
        await server.commit_update(Manifest(2, 1, 0), config)
        update = asyncio.ensure_future(server.commit_update(Manifest(3, 1, 0), config))
        assert not (await asyncio.wait([update], timeout=0.05))[0], "one is in flight, one serves"
        engine.may_finish.set()
        await asyncio.wait_for(asyncio.gather(running, update), 30)
        assert server.global_steps == 3

    asyncio.run(run())


def test_a_replica_that_is_closed_or_asleep_admits_no_request():
    async def run():
        engine = Engine()
        server = make_server(engine)
        for close, reopen in ((server.abort_all_requests, server.open_submission_gate), (server.sleep, server.wake_up)):
            await close()
            if server._is_asleep:
                await server.open_submission_gate()
            waiting = asyncio.ensure_future(generate(server))
            assert not (await asyncio.wait([waiting], timeout=0.05))[0] and not engine.has_begun.is_set()
            await reopen()
            await asyncio.wait_for(waiting, 30)
            engine.has_begun.clear()
        engine.acks = []
        with pytest.raises(RuntimeError, match="replica 0 did not go to sleep: no answer"):
            await server.sleep()

    asyncio.run(run())


def test_an_update_begun_sealed_and_activated_twice_is_loaded_once():
    """A sender whose answer was lost calls again."""

    async def run():
        engine = Engine()
        server = make_server(engine)
        engine.version = 3
        await asyncio.gather(*(server.begin_update("sockets", True, False, "update") for _ in range(2)))
        await server.begin_update("sockets", True, False, "update")
        await asyncio.gather(*(server.seal_update(Manifest(3, 9, 0), None) for _ in range(2)))
        assert await asyncio.gather(server.activate_weights(), server.activate_weights()) == [3, 3]
        assert await server.activate_weights() == 3
        assert [method for method, _ in engine.calls] == ["begin_update", "seal_weights", "commit_weights"]

    asyncio.run(run())


@pytest.mark.parametrize("loaded", [3, 4])
def test_what_the_workers_loaded_is_served_though_another_update_is_sealed_meanwhile(loaded):
    """A pipeline without step execution seals during a batch (`engine.ASIDE`), before or after the workers load."""

    class Late(Engine):
        async def collective_rpc(self, method, args=()):
            if method == "commit_weights" and self.sealed.version == 3:
                older = self.sealed
                await server.seal_update(Manifest(4, 9, 0), None)
                self.version = loaded
                return (self.taken(older if loaded == 3 else self.sealed),)
            self.version = self.sealed.version
            return await super().collective_rpc(method, args)

    async def run():
        nonlocal server
        server = make_server(engine)
        await server.seal_update(Manifest(3, 9, 0), None)
        assert [await server.activate_weights(), await server.activate_weights()] == [loaded, 4]
        assert server.global_steps == 4

    engine: Any = Late()
    server: Any = None
    asyncio.run(run())


@pytest.mark.parametrize("sends_adapter", [False, True])
def test_shards_that_do_not_change_with_the_update_are_an_error(sends_adapter):
    """Two workers, each with a shard: their numbers are not those of the update, and change with it."""

    class Sharded(Engine):
        held = (5, 7)

        def taken(self, published):
            return [Taken(published, sent=published.version, held=held, load_s=0.0) for held in self.held]

    async def run():
        engine = Sharded()
        server = make_server(engine, sends_adapter=sends_adapter)
        config: Any = object() if sends_adapter else None
        for version, held in ((1, (5, 7)), (1, (5, 7)), (2, (5, 8))):
            engine.held = held
            await server.begin_update("sockets", use_shm=True, is_live=False, update_id=uuid4().hex)
            await server.commit_update(Manifest(version, 9, 0), config)
        with pytest.raises(RuntimeError, match="replica 0 took version 3, and its workers hold the numbers"):
            await server.commit_update(Manifest(3, 9, 0), config)

    asyncio.run(run())
