# SPDX-License-Identifier: Apache-2.0
"""The sending end of a weight update: verl's vLLM adapter, with a manifest of what it sent.

Every rank of a replica sends all tensors to the engine worker beside it, in buckets (CUDA IPC, or shared memory where
the platform has none), through verl's `BucketedWeightSender`. Then the leader has the server compare and commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.utils import ensure_async_iterator
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from verl_digen.weights.checksum import Checksum
from verl_digen.weights.manifest import Manifest

logger = logging.getLogger(__name__)


class vLLMOmniServerAdapter(ServerAdapter):
    """See the module; methods are verl's."""

    def __init__(self, config: Any, model_config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, model_config, *args, **kwargs)
        self.sleep_level = 1
        self._wire_dtype = PrecisionType.to_dtype(self.config.dtype)
        self._adapter_config = omega_conf_to_dataclass(model_config).adapter_config()

    @torch.no_grad()
    async def update_weights(  # type: ignore[override]
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **unused: Any,
    ) -> None:
        """Send all `weights` and make them version `global_steps` on the server.

        Raises:
            RuntimeError: what arrived is not what the server holds; names the tensors. The old weights keep serving.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"vllm_omni replicas take full tensors only, got wire_format={wire_format!r}")
        assert global_steps is not None, "a weight update has a version"
        started_s = time.perf_counter()
        if self._has_server:
            self._ensure_server_handle()
            await self.server_handle.begin_update.remote(self.use_shm)
        total = Checksum()
        sender = BucketedWeightSender(
            zmq_handle=self.zmq_handle,
            bucket_size_mb=self.config.checkpoint_engine.update_weights_bucket_megabytes,
            use_shm=self.use_shm,
        )
        await sender.async_send_weights(self._on_the_wire(weights, total))
        manifest = Manifest(global_steps, total.num_tensors, total.value)
        if not self._has_server:
            return
        metrics = await self.server_handle.commit_update.remote(manifest, self._adapter_config)
        logger.debug("sent %d tensors in %.3f s: %s", total.num_tensors, time.perf_counter() - started_s, metrics)

    async def _on_the_wire(
        self, weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]], total: Checksum
    ) -> AsyncIterator[tuple[str, Tensor]]:
        async for name, tensor in ensure_async_iterator(weights):
            wire = tensor.detach()
            if wire.is_floating_point():
                wire = wire.to(self._wire_dtype)
            total.add(wire)
            yield name, wire
