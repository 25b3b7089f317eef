# SPDX-License-Identifier: Apache-2.0
"""verl's server manager and client, for samples instead of tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import ray
from omegaconf import DictConfig
from ray.exceptions import ActorDiedError, RayActorError
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
from verl.workers.rollout.router import DEFAULT_ROUTING_CACHE_SIZE, GlobalRequestLoadBalancer

from verl_digen.config import DigenConfig, digen_config
from verl_digen.errors import ReplicasLost
from verl_digen.processes.actors import retried, silence, while_alive
from verl_digen.processes.bundles import Bundles
from verl_digen.processes.deadlines import Deadlines
from verl_digen.reward.named import reads_latents
from verl_digen.sampling.outputs import ImageOutput
from verl_digen.sampling.requests import request_id, text_request
from verl_digen.types import Burst, Generation, SampleRequest, Stored

logger = logging.getLogger(__name__)


class DiffusionServerClient(LLMServerClient):
    """Sends each sample to the least-loaded replica (verl's load balancer).

    A replica that is overdue is asked for a sign of life. If it gives none, it is lost and its process is killed; if it
    does, its queue is long, and the client keeps waiting.
    """

    environments: Sequence[Any] = ()
    """Handles of the run's environment workers, for agent loop workers; set by the driver."""
    loop_workers: Sequence[Any] = ()
    """Agent loop workers that have started and are not connected, for their manager; set by the driver."""

    @cached_property
    def digen(self) -> DigenConfig:
        """The run's `digen:` section, read once per process: an agent loop is created for every sample."""
        return digen_config(self.config)

    @cached_property
    def _deadlines(self) -> Deadlines:
        return Deadlines(self.digen.deadlines, self.digen.reward.score_s)

    @cached_property
    def _clients(self) -> dict[Any, ReplicaClient]:
        """Server -> its client."""
        return {}

    @cached_property
    def _balancing(self) -> Bundles[tuple[str, dict[str, Any]]]:
        """Calls of one method of the balancer, by a function that travels by value: nothing is imported there."""
        call = self._load_balancer.__ray_call__
        return Bundles(
            lambda items: call.remote(
                lambda own, items: [getattr(own, name)(**kwargs) for name, kwargs in items], items
            ),
            key=lambda item: item[0],
        )

    async def generate(self, request_id: str, prompt: str, **sampling: Any) -> ImageOutput:  # type: ignore[override]
        """Generate one sample of a text prompt, on the replica that took the last one of this `request_id`.

        Args:
            request_id: its group; with `sample_index` (0 without it) and the run seed it determines the noise.
            sampling: see `verl_digen.sampling.requests.text_request`. ValueError for a setting that it does not take.
        """
        request = text_request(self.digen, request_id, prompt, **sampling)
        return ImageOutput.of(await self.generate_sample(request, sticky=request_id))

    async def generate_sample(self, request: SampleRequest, *, sticky: str | None = None) -> Generation:
        """Generate one sample on the least-loaded replica; retry on another one if that replica is lost, which gives
        the same sample. `sticky`: name whose samples go to one replica while the balancer remembers it; None: the
        sample's own. RunStopped: no replica is left."""
        name = request_id(request.uid, request.sample_index)
        sticky = name if sticky is None else sticky
        while True:
            try:
                replica, server = await self._balance("acquire_server", request_id=sticky)
            except RuntimeError as error:  # from verl's balancer, if it has no replica left
                raise ReplicasLost from error
            try:
                return await self._generate_on(replica, server, request)
            except RayActorError as error:
                logger.warning("replica %s is lost, sample %s goes to another one: %s", replica, name, error)
                self._clients.pop(server, None)
                await self._balance("remove_servers", server_ids=[replica])
            finally:
                self._balance("release_server", server_id=replica, request_id=sticky)

    def _balance(self, method: str, **arguments: Any) -> asyncio.Future[Any]:
        """Answer of verl's balancer to a call, which is made whether it is awaited or not."""
        return self._balancing.call((method, arguments))

    async def _generate_on(self, replica: str, server: Any, request: SampleRequest) -> Generation:
        """Generate the sample on `replica`; RayActorError if it died, or hung and was killed."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            generation = await while_alive(
                self._client_of(server).generate_sample(request),
                lambda: self._deadlines.bound("generate", replica).seconds,
                lambda: self._require_life(replica, server, waited_s=loop.time() - began_s),
            )
        except asyncio.CancelledError:  # the sample is not wanted any more
            server.abort_request.remote(request_id(request.uid, request.sample_index))
            raise
        self._deadlines.observe("generate", replica, seconds=loop.time() - began_s)
        return generation

    def _client_of(self, server: Any) -> ReplicaClient:
        if server not in self._clients:
            self._clients[server] = ReplicaClient(server, self.digen)
        return self._clients[server]

    async def _require_life(self, replica: str, server: Any, waited_s: float) -> None:
        """Kill a replica that gives no sign of life within `answer_s`, or that took longer than `no_progress_s`."""
        config = self.digen.deadlines
        if waited_s < config.no_progress_s and await silence(server, config, "check_health") is None:
            return
        logger.error("replica %s has not answered for %.0f s: it is ended", replica, waited_s)
        ray.kill(server)
        raise ActorDiedError


class ReplicaClient:
    """Sends samples to one given replica. `burst`: the requests that the client's one request is sent with."""

    def __init__(self, server: Any, digen: DigenConfig, *, burst: Burst | None = None):
        self.server = server
        self.digen = digen
        self._burst, self._wants_latents = burst, any(map(reads_latents, digen.reward.entries))
        # no more than a batch has, and of one group where there are more: they end together
        self._calls = Bundles(self._generate_all, size=digen.rollout.batch_size, cut_by=lambda request: request.uid)

    async def generate_sample(self, request: SampleRequest) -> Generation:
        """Generate one sample; RayActorError if the replica died, or was unreachable for longer than `blip_s`."""
        if self._wants_latents:
            request = replace(request, wants_latents=True)
        if self._burst is not None:
            request = replace(request, burst=self._burst)
        return await retried(lambda: self._calls.call(request), self.digen.deadlines.blip_s)

    async def _generate_all(self, requests: Sequence[SampleRequest]) -> list[Any]:
        """Outcomes of samples. Ranks that generate answer with references, because a sample stays with the rank that
        made it until the agent loop reads it."""
        answers = await self.server.generate_all.remote(requests)
        lists = [*{answer.samples for answer in answers if isinstance(answer, Stored)}]
        found = dict(zip(lists, await asyncio.gather(*lists), strict=True))
        return [found[one.samples][one.place] if isinstance(one, Stored) else one for one in answers]


class WithConditions:
    """Client whose samples all carry their prompts' conditions; in a run one sample of each group does."""

    def __init__(self, client: DiffusionServerClient):
        self.digen = client.digen
        self._client = client

    async def generate_sample(self, request: SampleRequest) -> Generation:
        return await self._client.generate_sample(replace(request, wants_condition=True))


class AsyncDiffusionServerManager(DiffusionServerClient):
    """The RFC's client over given replicas, with verl's balancer in this process: the least-loaded replica, and the
    same one again for a `request_id`, as long as it is among the `max_cache_size` last used. verl's class of that kind
    is today's `LLMServerClient`; `DiffusionServerManager` starts replicas."""

    def __init__(
        self, config: DictConfig, server_handles: Sequence[Any], max_cache_size: int = DEFAULT_ROUTING_CACHE_SIZE
    ):
        super().__init__(config)
        servers = {f"replica {number}": handle for number, handle in enumerate(server_handles)}
        self._balancer = GlobalRequestLoadBalancer(servers, max_cache_size)

    def _balance(self, method: str, **arguments: Any) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(getattr(self._balancer, method)(**arguments))
        return answer


class DiffusionServerManager(LLMServerManager):
    """verl's manager, which starts replicas and a balancer for all processes; its clients are `DiffusionServerClient`.
    The RFC's `AsyncDiffusionServerManager` is such a client."""

    @classmethod
    def adopt(cls, manager: LLMServerManager, *, keeps_one_server: bool) -> DiffusionServerManager:
        """Take over the replicas that verl's trainer launched through `manager`. `keeps_one_server`: one server that is
        never replaced needs no balancer, whose process would import verl to count to one."""
        adopted = cls.__new__(cls)
        vars(adopted).update(vars(manager))
        if keeps_one_server:
            ray.kill(manager.global_load_balancer)
            adopted.global_load_balancer = None
        return adopted

    def get_client(self, client_cls: type[LLMServerClient] | None = None, **kwargs: Any) -> LLMServerClient:
        """A client for agent loop workers."""
        if self.global_load_balancer is None:
            return AsyncDiffusionServerManager(self.config, self.server_handles)
        return super().get_client(client_cls or DiffusionServerClient, **kwargs)
