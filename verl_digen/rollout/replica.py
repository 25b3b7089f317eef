# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.name=diffusers`: one server actor per replica, on the device of its worker."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import RolloutMode

from verl_digen.rollout.birth import PlacedReplica, birth_variables, cpu_threads, reserved_device
from verl_digen.rollout.server import DiffusersServer


def server_name(replica_rank: int) -> str:
    """The Ray actor name under which trainer ranks find the server they send weights to."""
    return f"digen_diffusers_server_{replica_rank}"


class DiffusersReplica(PlacedReplica):
    """A replica of one device that denoises with the diffusers transformer and the project's sampler."""

    server_class: type[Any] = DiffusersServer

    async def launch_servers(self) -> None:
        """Start the server on the node and device of the replica's worker, and wait until the model is loaded."""
        platform = get_platform()
        model_config = omega_conf_to_dataclass(self.model_config)
        num_threads = cpu_threads(
            num_neighbours=model_config.digen.rollout.num_neighbours,
            num_devices=self.gpus_per_node,
            is_standalone=self.rollout_mode is RolloutMode.STANDALONE,
        )
        (worker,) = self.workers
        node_id, device = await worker.__ray_call__.remote(
            lambda _: (ray.get_runtime_context().get_node_id(), reserved_device().name)
        )
        server: Any = (
            ray.remote(self.server_class)
            .options(
                name=server_name(self.replica_rank),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                runtime_env={"env_vars": birth_variables(device)},
                max_concurrency=self.max_concurrency,
                num_cpus=0,
            )
            .remote(
                config=self.config,
                model_config=model_config,
                num_threads=num_threads if platform.device_name == "cpu" else 0,
            )
        )
        await server.ready.remote()
        await self.require_devices(await server.visible_devices.remote())
        self.servers = [server]
        self._server_handle = server
        self._server_address = server_name(self.replica_rank)
