# SPDX-License-Identifier: Apache-2.0
"""verl's server manager and client, speaking of samples instead of tokens."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

from ray.exceptions import RayActorError
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager

from verl_digen.agent_loop.requests import request_id
from verl_digen.config import DigenConfig, digen_config
from verl_digen.errors import RunStopped
from verl_digen.types import Generation, SampleRequest

logger = logging.getLogger(__name__)

ALL_LOST = (
    "every rollout replica is lost (their processes died; look for the reason above, out of memory is a common one); "
    "start again with trainer.resume_mode=auto, which continues after the last checkpoint"
)
"""Said by whoever notices."""


class DiffusionServerClient(LLMServerClient):
    """Sends each sample to the least-loaded replica (verl's load balancer)."""

    @cached_property
    def digen(self) -> DigenConfig:
        """The run's `digen:` section, read once per process: an agent loop is made for every sample."""
        return digen_config(self.config)

    async def generate_sample(self, request: SampleRequest) -> Generation:
        """Generate one sample on some replica; on another one, where its replica is lost meanwhile.

        It comes out the same, because a sample does not depend on who generates it.

        Raises:
            RunStopped: no replica is left.
        """
        name = request_id(request.uid, request.sample_index)
        while True:
            try:
                replica, server = await self._acquire_server(name)
            except RuntimeError as error:  # verl's, where its balancer has none left
                raise RunStopped(ALL_LOST) from error
            try:
                return await server.generate.remote(name, [], {"request": request})
            except RayActorError as error:
                logger.warning("replica %s is lost, sample %s goes to another one: %s", replica, name, error)
                await self._load_balancer.remove_servers.remote([replica])
            finally:
                self._release_server(replica, request_id=name)


class ServerClient:
    """Sends samples to one replica, the one that was chosen for them."""

    def __init__(self, server: Any, digen: DigenConfig):
        self.server = server
        self.digen = digen

    async def generate_sample(self, request: SampleRequest) -> Generation:
        """Generate one sample; RayActorError if the replica died."""
        name = request_id(request.uid, request.sample_index)
        return await self.server.generate.remote(name, [], {"request": request})


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
