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
from ray.exceptions import ActorDiedError, RayActorError
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager

from verl_digen.blips import through_blips
from verl_digen.config import DigenConfig, digen_config
from verl_digen.errors import RunStopped
from verl_digen.reward.named import any_reads_latents
from verl_digen.sampling.requests import request_id
from verl_digen.schedulers.deadlines import Deadlines
from verl_digen.types import Burst, Generation, SampleRequest

logger = logging.getLogger(__name__)

ALL_LOST = (
    "every rollout replica is lost (their processes died or hung; look for the reason above, out of memory is common); "
    "start again with trainer.resume_mode=auto, which continues after the last checkpoint"
)
"""Message of RunStopped when no replica is left."""


class DiffusionServerClient(LLMServerClient):
    """Sends each sample to the least-loaded replica (verl's load balancer).

    A replica that is overdue is asked for a sign of life. If it gives none, it is lost and its process is killed; if it
    does, its queue is long, and the client keeps waiting.
    """

    environments: Sequence[Any] = ()
    """Handles of the run's environment workers, for agent loop workers; set by the driver."""

    @cached_property
    def digen(self) -> DigenConfig:
        """The run's `digen:` section, read once per process: an agent loop is created for every sample."""
        return digen_config(self.config)

    @cached_property
    def _wants_latents(self) -> bool:
        """True if a reward of the run reads latents."""
        return any_reads_latents(self.digen.reward)

    @cached_property
    def _deadlines(self) -> Deadlines:
        return Deadlines(self.digen.deadlines)

    async def generate_sample(self, request: SampleRequest) -> Generation:
        """Generate one sample on the least-loaded replica; retry on another one if that replica is lost.

        The retry gives the same sample, because a sample does not depend on the replica that generates it.

        Raises:
            RunStopped: no replica is left.
        """
        name = request_id(request.uid, request.sample_index)
        while True:
            try:
                replica, server = await self._acquire_server(name)
            except RuntimeError as error:  # from verl's balancer, if it has no replica left
                raise RunStopped(ALL_LOST) from error
            try:
                return await self._generate_on(replica, server, request)
            except RayActorError as error:
                logger.warning("replica %s is lost, sample %s goes to another one: %s", replica, name, error)
                await self._load_balancer.remove_servers.remote([replica])
            finally:
                self._release_server(replica, request_id=name)

    async def _generate_on(self, replica: str, server: Any, request: SampleRequest) -> Generation:
        """Generate the sample on `replica`; RayActorError if it died, or hung and was killed."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        generating = asyncio.ensure_future(self._client_of(server).generate_sample(request))
        try:
            while not generating.done():
                bound = self._deadlines.bound("generate", replica)
                await asyncio.wait([generating], timeout=bound.seconds)
                if not generating.done():
                    await self._require_life(replica, server, waited_s=loop.time() - began_s)
        except asyncio.CancelledError:  # the sample is not wanted any more
            server.abort_request.remote(request_id(request.uid, request.sample_index))
            raise
        finally:
            generating.cancel()
        self._deadlines.observe("generate", replica, seconds=loop.time() - began_s)
        return generating.result()

    def _client_of(self, server: Any) -> ServerClient:
        return ServerClient(server, self.digen, wants_latents=self._wants_latents)

    async def _require_life(self, replica: str, server: Any, waited_s: float) -> None:
        """Kill a replica that gives no sign of life within `answer_s`, or that took longer than `no_progress_s`."""
        config = self.digen.deadlines
        try:
            if waited_s < config.no_progress_s:
                await asyncio.wait_for(through_blips(server.check_health.remote, config.blip_s), config.answer_s)
                return
        except asyncio.TimeoutError:
            pass
        logger.error("replica %s has not answered for %.0f s: it is ended", replica, waited_s)
        ray.kill(server)
        raise ActorDiedError


class ServerClient:
    """Sends samples to one given replica.

    Args:
        wants_latents: True if a reward of the run reads latents.
        burst: the requests that the client's one request is sent with.
    """

    def __init__(self, server: Any, digen: DigenConfig, *, wants_latents: bool = False, burst: Burst | None = None):
        self.server = server
        self.digen = digen
        self._wants_latents, self._burst = wants_latents, burst

    async def generate_sample(self, request: SampleRequest) -> Generation:
        """Generate one sample; RayActorError if the replica died, or was unreachable for longer than `blip_s`."""
        name = request_id(request.uid, request.sample_index)
        if self._wants_latents:
            request = replace(request, wants_latents=True)
        if self._burst is not None:
            request = replace(request, burst=self._burst)
        return await through_blips(
            lambda: self.server.generate.remote(name, [], {"request": request}), self.digen.deadlines.blip_s
        )


class AsyncDiffusionServerManager(LLMServerManager):
    """verl's manager of replicas and load balancer, whose clients are `DiffusionServerClient`."""

    @classmethod
    def adopt(cls, manager: LLMServerManager) -> AsyncDiffusionServerManager:
        """Take over the replicas that verl's trainer launched through `manager`."""
        adopted = cls(
            manager.config,
            worker_group=manager.worker_group,
            rollout_resource_pool=manager.rollout_resource_pool,
            start_rank=manager.start_rank,
        )
        adopted.rollout_replicas = manager.rollout_replicas
        adopted.server_handles = manager.server_handles
        adopted.server_addresses = manager.server_addresses
        adopted.global_load_balancer = manager.global_load_balancer
        return adopted

    def get_client(self, client_cls: type[LLMServerClient] | None = None, **kwargs: Any) -> LLMServerClient:
        """A client for agent loop workers."""
        return super().get_client(client_cls or DiffusionServerClient, **kwargs)
