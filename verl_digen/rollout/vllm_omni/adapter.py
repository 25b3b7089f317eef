# SPDX-License-Identifier: Apache-2.0
"""Weight sender of a `vllm_omni` replica: verl's vLLM adapter, with a manifest of the tensors sent."""

import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from verl_digen.rollout.replica import ReplicaHandle
from verl_digen.rollout.vllm_omni.settings import address, sockets_of
from verl_digen.weights.sending import Wire


class vLLMOmniServerAdapter(ServerAdapter):
    """Sender of a rank; methods are verl's. Every rank of a replica sends all tensors to the engine worker of the same
    local rank, by CUDA IPC, or in shared memory where the platform has none. Then the leader has the server check and
    commit."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh, replica_rank)
        self._takes_turns = replica_rank < 0
        model = omega_conf_to_dataclass(model_config)
        self._adapter_config = model.adapter_config()
        self._timeout_s = model.digen.rollout.update_timeout_s
        self._sockets = sockets_of(self.replica_rank)
        self.zmq_handle = address(self._sockets, self.rollout_rank % int(os.environ["RAY_LOCAL_WORLD_SIZE"]))
        self._replica = ReplicaHandle(
            f"{self._get_server_name_prefix()}server_{self.replica_rank}_{self.node_rank}", model.digen.deadlines.blip_s
        )

    async def resume(self, tags: list[str]) -> None:
        """Wake the server before its weights are replaced."""
        if self._has_server and self.config.free_cache_engine and "weights" in tags:
            self._replica.find_successor()
            await self._replica.call("wake_up")

    async def release(self) -> None:
        """Put the server to sleep."""
        if self._has_server and self.config.free_cache_engine:
            await self._replica.call("sleep")

    @torch.no_grad()
    async def update_weights(  # type: ignore[override]
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]],
        global_steps: int | None = None,
        **unused: Any,
    ) -> None:
        """Send all `weights` as version `global_steps`, see `ReplicaHandle.update`. RuntimeError if the tensors do not
        match the server's; names them, and the weights that serve now."""
        assert global_steps is not None, "a weight update has a version"
        is_live = self._takes_turns and self._adapter_config is None  # an adapter is registered beside the old ones
        wire = Wire.of_run(self.zmq_handle, self.config, self._timeout_s, use_shm=self.use_shm, is_live=is_live)
        await self._replica.update(
            *(weights, wire, global_steps, self._adapter_config),
            address=self._sockets,
            takes_turns=self._takes_turns,
            leads=self._has_server,
        )
