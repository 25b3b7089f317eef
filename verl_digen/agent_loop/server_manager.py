# SPDX-License-Identifier: Apache-2.0
"""verl's server manager and client, speaking of samples instead of tokens."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager

from verl_digen.config import DigenConfig, digen_config
from verl_digen.types import Generation, SampleRequest


class DiffusionServerClient(LLMServerClient):
    """Sends each sample to the least-loaded replica (verl's load balancer)."""

    @cached_property
    def digen(self) -> DigenConfig:
        """The run's `digen:` section, read once per process: an agent loop is made for every sample."""
        return digen_config(self.config)

    async def generate_sample(self, request: SampleRequest) -> Generation:
        """Generate one sample on some replica."""
        output: Any = await self.generate(
            f"{request.uid}_{request.sample_index}", prompt_ids=[], sampling_params={"request": request}
        )
        return output


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
