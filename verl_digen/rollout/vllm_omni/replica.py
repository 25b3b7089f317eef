# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.name=vllm_omni`: verl's vLLM replica, whose servers run vLLM-Omni."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from verl_digen.rollout.birth import BornOnDevices, PlacedReplica
from verl_digen.rollout.vllm_omni.server import vLLMOmniHttpServer

SERVER_PREFIX = "vllm_omni_"
"""Prefix of the server names that verl uses; `ServerAdapter` looks them up by `{rollout.name}_`."""


class vLLMOmniReplica(PlacedReplica, vLLMReplica):
    """A replica of `actor_rollout_ref.rollout.tensor_model_parallel_size` devices on one node."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.nnodes != 1:
            raise ValueError(
                "actor_rollout_ref.rollout.tensor_model_parallel_size must fit one node with "
                f"actor_rollout_ref.rollout.name=vllm_omni, got {self.world_size} devices on {self.nnodes}; lower it"
            )
        self.server_class = BornOnDevices(vLLMOmniHttpServer)

    async def launch_servers(self) -> None:
        """Run verl's method, then check the devices that the engine's workers found."""
        await super().launch_servers()
        await self.require_devices(await self.servers[0].visible_devices.remote())

    def _get_server_name_prefix(self) -> str:
        return SERVER_PREFIX
