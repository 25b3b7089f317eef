# SPDX-License-Identifier: Apache-2.0
"""A client over fake replicas: one that hangs is killed, one that is slow is waited for."""

import asyncio
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import ray
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from tests.chaos.loop import run_in_virtual_time
from tests.reward.samples import LATENT
from verl_digen.agent_loop.server_manager import DiffusionServerClient, DiffusionServerManager, ReplicaClient
from verl_digen.config import DigenConfig, RewardConfig
from verl_digen.errors import RunStopped
from verl_digen.processes import actors
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.sampling.requests import sample_request
from verl_digen.types import Burst, PromptRow

pytestmark = pytest.mark.virtual_time

DIGEN = DigenConfig(deadlines=DeadlinesConfig(first_s=100.0, answer_s=5.0, no_progress_s=1000.0))
ROW = PromptRow("a cat", "test", None, uid="val-00000")


def remote(method):
    return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))


class Server:
    """Server that takes `takes_s` per sample; if `is_silent`, gives no sign of life; ended by `ray.kill`."""

    def __init__(self, takes_s=1.0, is_silent=False, errors=()):
        self.takes_s, self.is_silent, self.errors = takes_s, is_silent, list(errors)
        self.is_ended = False
        self.num_asked = 0
        self.asked = []
        self.aborted = []
        self.generate_all, self.check_health = remote(self._generate_all), remote(self._check_health)
        self.abort_request = SimpleNamespace(remote=self.aborted.append)

    async def _generate_all(self, requests):
        self.num_asked += 1
        self.asked += requests
        if self.errors:
            raise self.errors.pop(0)
        await asyncio.sleep(self.takes_s)
        return [f"from {self.name}" for _ in requests]

    async def _check_health(self):
        if self.is_silent:
            await asyncio.Event().wait()
        return {}


class InOrder(GlobalRequestLoadBalancer):
    """verl's balancer, handing out its replicas in order."""

    def acquire_server(self, request_id):
        super().acquire_server(request_id)  # raises without a replica
        return next(iter(self._servers.items()))


class Balancer:
    """The handle of a balancer."""

    def __init__(self, balancer_class=InOrder, **servers):
        for name, server in servers.items():
            server.name = name
        self.balancer = balancer_class(servers)
        self.num_calls = 0
        self.__ray_call__ = remote(self._call)

    async def _call(self, function, *args):
        self.num_calls += 1
        return function(self.balancer, *args)


class Client(DiffusionServerClient):
    """Client without verl's constructor, which needs its config."""

    def __init__(self, balancer):
        self._load_balancer = balancer
        self.__dict__["digen"] = DIGEN


def generate(monkeypatch, **servers):
    """Generate one sample -> (the sample, virtual seconds)."""
    monkeypatch.setattr(ray, "kill", lambda server: setattr(server, "is_ended", True))
    monkeypatch.setattr(actors, "is_starting", lambda server: False)

    async def run():
        client = Client(Balancer(**servers))
        sample = await client.generate_sample(sample_request(DIGEN, ROW, 0, step=1, validate=True))
        return sample, asyncio.get_running_loop().time()

    return run_in_virtual_time(run())


async def test_samples_of_one_pass_are_assigned_generated_and_released_together():
    servers = {"one": Server(), "two": Server()}
    balancer = Balancer(GlobalRequestLoadBalancer, **servers)
    client = Client(balancer)
    asked = [sample_request(DIGEN, ROW, index, step=1, validate=True) for index in range(20)]
    samples = await asyncio.gather(*map(client.generate_sample, asked))
    await asyncio.sleep(1.0)
    assert sorted(samples) == ["from one"] * 10 + ["from two"] * 10
    assert [server.num_asked for server in servers.values()] == [2, 2], "a batch holds 8"
    assert balancer.num_calls == 2 and balancer.balancer.get_total_inflight() == 0, "acquired and released"


def test_a_replica_that_hangs_is_ended_and_its_sample_goes_to_another_one(monkeypatch):
    hung, other = Server(takes_s=1e9, is_silent=True), Server()
    sample, took_s = generate(monkeypatch, hung=hung, other=other)
    assert sample == "from other" and hung.is_ended and not other.is_ended
    assert took_s == pytest.approx(100.0 + 5.0 + 1.0), "first_s, answer_s, then the sample"


def test_requests_ask_for_latents_where_a_reward_reads_them(monkeypatch):
    latents = {"weight": 1.0, "reward": LATENT}
    for functions, wanted in (({"mine": latents}, True), ({"jpeg_compressibility": 1.0}, False)):
        server = Server()
        monkeypatch.setattr(f"{__name__}.DIGEN", replace(DIGEN, reward=RewardConfig(functions=functions)))
        generate(monkeypatch, one=server)
        assert [asked.wants_latents for asked in server.asked] == [wanted]


async def test_a_request_carries_the_burst_that_it_is_sent_with():
    server = Server()
    server.name = "one"
    asked = sample_request(DIGEN, ROW, 0, step=1, validate=True)
    for burst in (Burst("7", 4), None):
        await ReplicaClient(server, DIGEN, burst=burst).generate_sample(asked)
    together, alone = server.asked
    assert together == replace(asked, burst=Burst("7", 4)) and alone == asked


def test_a_replica_with_a_long_queue_gives_signs_of_life_and_is_waited_for(monkeypatch):
    slow = Server(takes_s=900.0)
    assert generate(monkeypatch, slow=slow) == ("from slow", pytest.approx(900.0))
    assert not slow.is_ended and slow.num_asked == 1


def test_a_replica_that_lives_and_never_ends_is_ended_when_a_run_may_wait_no_longer(monkeypatch):
    stuck, other = Server(takes_s=1e9), Server()
    sample, took_s = generate(monkeypatch, stuck=stuck, other=other)
    assert sample == "from other" and stuck.is_ended and 1000.0 <= took_s <= 1102.0


async def test_a_sample_that_is_not_wanted_any_more_is_withdrawn_from_its_replica():
    server = Server(takes_s=900.0)
    client = Client(Balancer(one=server))
    wanted = asyncio.create_task(client.generate_sample(sample_request(DIGEN, ROW, 2, step=1, validate=True)))
    await asyncio.sleep(1.0)
    wanted.cancel()
    await asyncio.wait([wanted])
    assert wanted.cancelled() and server.aborted == ["val-00000_2"]


def test_a_blip_is_no_death(monkeypatch):
    blinks = Server(errors=[ActorUnavailableError("away", None)] * 2)
    assert generate(monkeypatch, blinks=blinks, other=Server()) == ("from blinks", pytest.approx(0.5 + 0.75 + 1.0))


def test_a_replica_out_of_reach_for_longer_than_a_blip_or_dead_is_left_for_another_one(monkeypatch):
    away = Server(errors=[ActorUnavailableError("away", None)] * 99)
    dead = Server(errors=[ActorDiedError()])
    sample, took_s = generate(monkeypatch, away=away, dead=dead, other=Server())
    assert sample == "from other" and took_s == pytest.approx(DIGEN.deadlines.blip_s + 1.0)


async def test_nothing_is_kept_for_a_lost_replica():
    client = Client(Balancer(dead=Server(errors=[ActorDiedError()]), other=Server()))
    await client.generate_sample(sample_request(DIGEN, ROW, 0, step=1, validate=True))
    assert [server.name for server in client._clients] == ["other"]


def test_without_a_replica_the_run_stops(monkeypatch):
    with pytest.raises(RunStopped, match="every rollout replica is lost"):
        generate(monkeypatch, dead=Server(errors=[ActorDiedError()]))


@pytest.mark.parametrize("keeps_one_server", [True, False])
def test_one_server_that_is_never_replaced_has_no_process_that_balances(monkeypatch, keeps_one_server):
    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "trainer", "nnodes": 1}, "model": {}}})
    given: Any = SimpleNamespace(config=config, server_handles=["server"], global_load_balancer="balancer")
    client: Any = DiffusionServerManager.adopt(given, keeps_one_server=keeps_one_server).get_client()
    client = pickle.loads(cloudpickle.dumps(client))  # as it travels to agent loop workers
    if keeps_one_server:
        assert killed == ["balancer"]
        assert [client._balancer.acquire_server(name)[1] for name in "ab"] == ["server", "server"]
    else:
        assert killed == [] and client._load_balancer == "balancer"
