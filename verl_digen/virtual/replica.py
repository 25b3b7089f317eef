# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.name=virtual`: a replica without its own process."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.actor import ActorHandle
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from verl_digen.config import digen_config
from verl_digen.virtual.host import MAX_CONCURRENCY, NAME, VirtualHost, VirtualServer


class VirtualReplica(RolloutReplica):
    """Virtual replica. All replicas share one host, which starts with the first and is also that one's worker.

    There are no servers to wake or to stop, so verl's calls around a step have no target.
    """

    async def init_standalone(self) -> None:
        """Initialise without a resource pool or workers: a virtual device uses no real one."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Find or start the host."""
        if self.rollout_mode is not RolloutMode.STANDALONE:
            raise ValueError(
                "actor_rollout_ref.rollout.name=virtual needs separate pools (trainer.v1.trainer_mode=digen_virtual), "
                f"got replicas in mode {self.rollout_mode.value}; use recipe=[...,disaggregated,virtual]"
            )
        section: Any = self.model_config
        digen = digen_config(OmegaConf.create({"digen": section.digen}))
        host: Any = (
            ray.remote(VirtualHost)
            .options(name=NAME, get_if_exists=True, max_concurrency=MAX_CONCURRENCY, num_cpus=0)
            .remote(digen)
        )
        await asyncio.wrap_future(host.__ray_ready__.remote().future())
        self.workers = [host] if self.replica_rank == 0 else []
        handle: Any = VirtualServer(host, self.replica_rank)
        self._server_handle: ActorHandle = handle
        self._server_address = f"virtual_{self.replica_rank}"
