# SPDX-License-Identifier: Apache-2.0
"""Weight sender of a `vllm_omni` replica: verl's vLLM adapter, with a manifest of the tensors sent.

Every rank of a replica sends all tensors to the engine worker of the same local rank, in buckets (CUDA IPC, or shared
memory where the platform has none), through verl's `BucketedWeightSender`. Then the leader has the server check and
commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
import zmq
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.utils import ensure_async_iterator
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from verl_digen.rollout.lost import ReplicaHandle, drain
from verl_digen.weights.checksum import Checksum, Manifest

logger = logging.getLogger(__name__)


class BoundedSender(BucketedWeightSender):
    """verl's sender, with a timeout on each wait for the receiver.

    Args:
        timeout_s: timeout for the receiver to accept one part.
    """

    def __init__(self, *args: Any, timeout_s: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._timeout_ms = round(timeout_s * 1000)

    def _init_socket(self) -> None:
        super()._init_socket()
        assert self.socket is not None
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            self.socket.setsockopt(option, self._timeout_ms)
        self.socket.setsockopt(zmq.LINGER, 0)


class vLLMOmniServerAdapter(ServerAdapter):
    """See the module; methods are verl's."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh, replica_rank)
        self._takes_turns = replica_rank < 0
        self.sleep_level = 1
        self._wire_dtype = PrecisionType.to_dtype(self.config.dtype)
        model = omega_conf_to_dataclass(model_config)
        self._adapter_config = model.adapter_config()
        self._timeout_s = model.digen.rollout.update_timeout_s
        self._replica = ReplicaHandle(
            f"{self._get_server_name_prefix()}server_{self.replica_rank}_{self.node_rank}",
            model.digen.deadlines.blip_s,
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
        wire_format: str = "named_tensors",
        **unused: Any,
    ) -> None:
        """Send all `weights` as version `global_steps`. A server on its own devices stages them until
        `activate_weights`; one that shares devices with the trainer loads them at once.

        Raises:
            RuntimeError: the tensors do not match the server's; names them. The old weights keep serving.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"vllm_omni replicas take full tensors only, got wire_format={wire_format!r}")
        assert global_steps is not None, "a weight update has a version"
        started_s = time.perf_counter()
        if self._has_server:
            self._replica.find_successor()
            await self._replica.call("begin_update", self.use_shm)
        if self._replica.is_lost:
            await drain(weights)
            return
        total = Checksum()
        sender = BoundedSender(
            zmq_handle=self.zmq_handle,
            bucket_size_mb=self.config.checkpoint_engine.update_weights_bucket_megabytes,
            use_shm=self.use_shm,
            timeout_s=self._timeout_s,
        )
        try:
            await sender.async_send_weights(self._on_the_wire(weights, total))
        except zmq.Again as error:
            raise RuntimeError(
                f"{self._replica.name} took no part of a weight update for digen.rollout.update_timeout_s="
                f"{self._timeout_s:g} s; it is dead or hung, or the limit is too low"
            ) from error
        if self._has_server:
            manifest = Manifest(global_steps, total.num_tensors, total.value)
            await self._replica.call(
                "commit_update" if self._takes_turns else "seal_update", manifest, self._adapter_config
            )
            logger.debug("sent %d tensors in %.3f s", total.num_tensors, time.perf_counter() - started_s)

    async def _on_the_wire(
        self, weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]], total: Checksum
    ) -> AsyncIterator[tuple[str, Tensor]]:
        async for name, tensor in ensure_async_iterator(weights):
            wire = tensor.detach()
            if wire.is_floating_point():
                wire = wire.to(self._wire_dtype)
            total.add(wire)
            yield name, wire
