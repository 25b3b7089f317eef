# SPDX-License-Identifier: Apache-2.0
"""The trainer ranks' side of a `diffusers` replica: streams new weights to the replica's server.

Every rank drains the generator, because materialising a tensor is a collective; the leader rank of each replica
sends. Buckets travel as Ray objects (shared memory on one node), at most one in flight.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import ray
import torch
from torch import Tensor
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.base import BaseRollout

from verl_digen.rollout.replica import server_name

logger = logging.getLogger(__name__)


class DiffusersServerAdapter(BaseRollout):
    """verl's per-rank handle on the rollout; constructor and methods are verl's."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any):
        super().__init__(config, model_config, device_mesh, *args, **kwargs)
        self.replica_rank = torch.distributed.get_rank()  # one device per replica
        self.is_leader_rank = True
        self.sleep_level = 1
        self._wire_dtype = PrecisionType.to_dtype(self.config.dtype)
        self._bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        self._server: Any = None

    def _server_handle(self) -> Any:
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """Wake the server before its weights are replaced."""
        if "weights" in tags:
            await self._server_handle().wake_up.remote()

    async def release(self) -> None:
        """Put the server to sleep."""
        await self._server_handle().sleep.remote()

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Send all `weights` and make them version `global_steps` on the server.

        Raises:
            RuntimeError: the server found a tensor missing, unknown or of another shape.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"the diffusers replica takes full tensors only, got wire_format={wire_format!r}")
        started_s = time.perf_counter()
        server = self._server_handle()
        bucket: dict[str, Tensor] = {}
        num_bytes = num_tensors = 0
        for name, tensor in weights:
            wire = tensor.detach().to(device="cpu", dtype=self._wire_dtype)
            bucket[name] = wire
            num_bytes += wire.nbytes
            num_tensors += 1
            if num_bytes >= self._bucket_bytes:
                await server.receive_weights.remote(bucket)
                bucket, num_bytes = {}, 0
        if bucket:
            await server.receive_weights.remote(bucket)
        await server.commit_weights.remote(version=kwargs["global_steps"], num_tensors=num_tensors)
        logger.debug("sent %d tensors in %.3f s", num_tensors, time.perf_counter() - started_s)
