# SPDX-License-Identifier: Apache-2.0
"""Ranks that generate with the weights that they train, against a `diffusers` replica of the same weights."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from ray.exceptions import RayActorError, RayError, RayTaskError
from torch.distributed.tensor import DTensor

from tests.engine.harness import LORA, make_engine, perturb
from tests.pretend.process import on_pretend
from tests.rollout.test_encoders import note_turns
from tests.rollout.test_server import GUIDED, SAMPLING, generate, make_requests, make_server
from tests.sampling.runs import assert_bitwise
from tests.tags import changed
from verl_digen.engine.assistant import RankGenerator
from verl_digen.engine.copies import AVERAGE, CURRENT
from verl_digen.errors import RunStopped
from verl_digen.processes.relays import Work
from verl_digen.rollout.batcher import Withdrawn
from verl_digen.trainer import generating
from verl_digen.trainer.generating import TrainerServer

SEED = 7


class Rank:
    """The one rank of a run, in this process."""

    num_processes = 1

    def __init__(self, engine: Any):
        self.generator = RankGenerator(engine, torch.float32)
        self.drawn: list[tuple[int, int]] = []
        """(samples, prompts that come later) of each batch."""
        self.rests = 0

    async def call(self, work: Work, keep: str) -> list[Any]:
        if work.method == "rest":
            self.rests += 1
            return [self.generator.rest()]
        requests, coming, version = work.args
        self.drawn.append((len(requests), len(coming)))
        return [(self.generator.draw(requests, coming, version), self.generator.facts())]


def server_of(rank: Any, max_batch_size: int = 4) -> TrainerServer:
    server = TrainerServer(max_batch_size=max_batch_size, wait_s=0.01)
    server._ranks = rank
    return server


def engine_of(path: Path, **options: Any) -> Any:
    digen = {"seed": SEED} | options.pop("digen", {})
    return make_engine(path, digen=digen, **options)


async def drawn(server: TrainerServer, requests: Any, version: int = 3) -> list[Any]:
    """Samples that were asked for before the server had weights."""
    asked = [asyncio.create_task(server._batcher.submit(one)) for one in requests]
    await asyncio.sleep(0)
    await server.activate(version)
    return await asyncio.gather(*asked)


@pytest.mark.parametrize("sampling", [SAMPLING, GUIDED], ids=["plain", "guided"])
def test_samples_are_bitwise_those_of_a_replica(one_rank, tiny_qwen_image, sampling):
    # whole batches: a batch of one multiplies vectors, whose rounding depends on where the memory of the weights begins
    rank, requests = Rank(engine_of(tiny_qwen_image)), make_requests(sampling)[:8]
    found = asyncio.run(drawn(server_of(rank), requests))
    expected = generate(make_server(tiny_qwen_image, seed=SEED, batch_wait_s=60.0), requests)
    assert len(found) == len(requests) == 8 and [size for size, _ in rank.drawn] == [4, 4]
    for own, theirs in zip(found, expected, strict=True):
        assert_bitwise(own.trajectory, changed(theirs.trajectory, version=3, last_version=3))
        # a value of the VAE at the edge of rounding may fall to either side
        assert (own.pixels.int() - theirs.pixels.int()).abs().max() <= 1
        for condition, other in (
            (own.condition, theirs.condition),
            (own.negative_condition, theirs.negative_condition),
        ):
            assert (condition is None) == (other is None)
            assert condition is None or all(torch.equal(condition[name], other[name]) for name in condition)


@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
def test_an_exported_policy_generates_and_the_weights_that_train_stay(one_rank, tiny_qwen_image, model):
    engine = engine_of(tiny_qwen_image, model=model, digen={"ema": {"enable": True}})
    rank, requests = Rank(engine), make_requests()[:2]

    def sample() -> torch.Tensor:
        return torch.stack([one.trajectory.record.latents for one in asyncio.run(drawn(server_of(rank), requests))])

    before = sample()
    perturb(engine)  # the average stays
    weights = {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}
    after = sample()
    engine.exports = AVERAGE
    assert torch.equal(sample(), before) and not torch.equal(after, before)
    engine.exports = CURRENT
    assert torch.equal(sample(), after)
    assert all(torch.equal(weight, weights[name]) for name, weight in engine.module.named_parameters())


async def test_a_prompt_that_the_encoder_refuses_fails_alone(one_rank, tiny_qwen_image, monkeypatch):
    rank, requests = Rank(engine_of(tiny_qwen_image)), make_requests()[::3]
    encode = rank.generator._encoders.prompts._encode

    def refuse(prompts: Any) -> Any:
        if any("p2" in prompt.text for prompt in prompts):
            raise ValueError("too long")
        return encode(prompts)

    monkeypatch.setattr(rank.generator._encoders.prompts, "_encode", refuse)
    server = server_of(rank)
    await server.activate(0)
    asked = [server._batcher.submit(one) for one in requests]
    first, second, third = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(second, ValueError) and str(second) == "too long"
    assert [one.trajectory.facts.uid for one in (first, third)] == ["p1", "p3"]


class Ranks:
    """Ranks that answer with the number of samples they know, fail, or are lost."""

    num_processes = 2

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.calls: list[str] = []
        self.versions: list[int] = []
        self.is_lost = False
        self.announced: list[tuple[str, ...]] = []

    async def call(self, work: Work, keep: str) -> list[Any]:
        self.calls.append(work.method)
        if self.is_lost:
            raise RayActorError
        if self.failures:
            raise self.failures.pop()
        if work.method == "rest":
            return [None]
        requests, coming, version = work.args
        self.versions.append(version)
        self.announced.append(tuple(inputs.text for inputs in coming))
        facts = {"prompt_cache": {"hits": 2, "misses": 1}, "fitted": 2}
        halves = [range(0, len(requests), 2), range(1, len(requests), 2)]  # of two ranks
        return [([(place, f"{requests[place].uid}_{place}") for place in half], facts) for half in halves]


async def test_no_batch_runs_before_there_are_weights_and_while_the_ranks_train():
    ranks = Ranks()
    server, request = server_of(ranks), make_requests()[0]

    def ask() -> asyncio.Task[Any]:
        return asyncio.create_task(server._batcher.submit(request))

    early = ask()
    await asyncio.sleep(0.05)
    assert ranks.calls == [], "there are no weights"
    await server.activate(5)
    assert await early == "p1_0"
    await server.sleep()
    late = ask()
    await asyncio.sleep(0.05)
    assert ranks.calls == ["draw", "rest"] and not late.done(), "the ranks train"
    await server.abort_request("p1_0")
    with pytest.raises(Withdrawn):
        await late
    later = ask()
    await server.activate(6)
    await later
    assert ranks.versions == [5, 6]
    health = await server.check_health()
    assert health["version"] == health["received_version"] == 6 and health["prompt_cache"]["hits"] == 2


async def test_ranks_hear_of_a_later_prompt_once_and_batches_have_what_fitted():
    ranks = Ranks()
    server = server_of(ranks)
    await drawn(server, make_requests())
    assert ranks.announced[0] == ("prompt of p3",), "p1 and p2 are in the first batch"
    assert set(ranks.announced[1:]) == {()} and len(ranks.announced) == 4, "4 samples, then 2 fit together"


async def test_a_lost_rank_is_no_lost_replica():
    ranks = Ranks()
    ranks.is_lost = True
    server = server_of(ranks)
    await server.activate(0)
    with pytest.raises(RuntimeError, match="a rank of the trainer was lost while it generated") as error:
        await server._batcher.submit(make_requests()[0])
    assert not isinstance(error.value, RayError), "the sample cannot go to another replica"


@pytest.mark.parametrize("num_processes", [1, 2])
async def test_after_a_failure_of_one_of_several_ranks_none_draws_again(num_processes):
    """The others may wait for it in a collective, which its next draw would meet."""
    ranks = Ranks()
    ranks.num_processes = num_processes
    ranks.failures = [RayTaskError("draw", "", torch.OutOfMemoryError("no room"))]
    server, request = server_of(ranks), make_requests()[0]
    await server.activate(0)
    with pytest.raises(RayTaskError if num_processes == 1 else RunStopped):
        await server._batcher.submit(request)
    if num_processes == 1:
        assert await server._batcher.submit(request) == "p1_0"
    else:
        with pytest.raises(RunStopped, match=r"OutOfMemoryError: no room.*max_batch_size"):
            await server._batcher.submit(request)
        assert ranks.calls == ["draw"]


def test_one_replica_spans_all_ranks(monkeypatch):
    started = []
    monkeypatch.setattr(generating, "start_server", lambda *arguments: started.append(arguments) or "a server")
    monkeypatch.setattr(generating.TrainerReplica, "early_server", None)
    config = OmegaConf.create({
        "trainer": {"nnodes": 3, "n_gpus_per_node": 4},
        "digen": {"rollout": {"max_batch_size": 16}},
        "actor_rollout_ref": {
            "rollout": {"name": "trainer", "data_parallel_size": 1, "tensor_model_parallel_size": 1},
            "actor": {"fsdp_config": {"ulysses_sequence_parallel_size": 2}},
        },
    })  # fmt: skip
    generating.begin_generating(config)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.data_parallel_size, rollout.tensor_model_parallel_size) == (6, 2)
    assert [(ranks, settings.max_batch_size) for ranks, settings in started] == [(6, 16)]
    assert generating.TrainerReplica.early_server == "a server"


# -- on the pretend device -----------------------------------------------------------------------------------------
def held(modules: Any) -> int:
    """Bytes of device memory of modules."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(one.untyped_storage().nbytes() for one in locals_ if one.device.type != "cpu")


def in_turns(path: str, folder: str, options: dict[str, Any]) -> list[str]:
    """The networks that ran with encoders on the host, in turn; samples of both places are compared."""
    torch.distributed.init_process_group(
        "cpu:gloo,pretend:gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    asked = make_requests(GUIDED)[:4]

    def sample(encoders: str) -> tuple[list[Any], list[str]]:
        engine = engine_of(Path(path), digen={"rollout": {"encoders": encoders}}, **options)
        rank = Rank(engine)
        generator = rank.generator
        networks = {"encode": generator._encoders.encode.modules, "denoise": (engine.module,)}
        decoders = generator._decoders._modules
        ran = note_turns(networks, held, on_host=encoders == "host")
        server = server_of(rank, max_batch_size=2)
        found = asyncio.run(drawn(server, asked))
        asyncio.run(server.sleep())
        assert rank.rests == 1 and not held(decoders) and not held(networks["encode"]) and held(networks["denoise"])
        generator.renew()
        assert held(decoders) and bool(held(networks["encode"])) == (encoders == "device")
        return found, ran

    (on_device, _), (on_host, ran) = sample("device"), sample("host")
    for one, other in zip(on_device, on_host, strict=True):
        assert_bitwise(one.trajectory, other.trajectory)
        assert torch.equal(one.pixels, other.pixels)
    return ran


@pytest.mark.parametrize("options", [{}, {"model": LORA}], ids=["full", "lora"])
def test_encoders_on_the_host_and_the_network_are_never_on_the_device_together(tiny_qwen_image, tmp_path, options):
    ran = on_pretend(in_turns, str(tiny_qwen_image), str(tmp_path), options)
    assert ran == ["encode", "denoise"], "the prompts of both batches are encoded in one turn"
