# SPDX-License-Identifier: Apache-2.0
"""Trainer-side weight sender of a `diffusers` replica: streams new weights to the replica's server.

Every rank drains the generator, because materialising a tensor is a collective; the leader rank of each replica
sends. Buckets travel as Ray objects (shared memory on one node), at most one in flight.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
from torch import Tensor
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from verl_digen.rollout.lost import ReplicaHandle
from verl_digen.rollout.replica import server_name

logger = logging.getLogger(__name__)


class DiffusersServerAdapter(BaseRollout):
    """verl's per-rank handle on the rollout; constructor and methods are verl's."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **kwargs: Any):
        super().__init__(config, model_config, device_mesh, **kwargs)
        # one device per replica; a replica on its own devices has an explicit rank and switches when it is told to
        self._takes_turns = replica_rank < 0
        self.replica_rank = torch.distributed.get_rank() if self._takes_turns else replica_rank
        self.is_leader_rank = True
        self.sleep_level = 1
        self._wire_dtype = PrecisionType.to_dtype(self.config.dtype)
        self._bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        self._replica = ReplicaHandle(server_name(self.replica_rank), self.model_config.digen.deadlines.blip_s)

    async def resume(self, tags: list[str]) -> None:
        """Wake the server before its weights are replaced."""
        if "weights" in tags:
            self._replica.find_successor()
            await self._replica.call("wake_up")

    async def release(self) -> None:
        """Put the server to sleep."""
        await self._replica.call("sleep")

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Send all `weights` as version `global_steps`. A server on its own devices stages them until
        `activate_weights`; one that shares devices with the trainer loads them at once.

        Raises:
            RuntimeError: the server found a tensor missing, unknown or of another shape.
        """
        self._replica.find_successor()
        if wire_format != "named_tensors":
            raise ValueError(f"the diffusers replica takes full tensors only, got wire_format={wire_format!r}")
        started_s = time.perf_counter()
        bucket: dict[str, Tensor] = {}
        num_bytes = num_tensors = 0
        async for name, tensor in ensure_async_iterator(weights):
            wire = tensor.detach().to(device="cpu", dtype=self._wire_dtype)
            bucket[name] = wire
            num_bytes += wire.nbytes
            num_tensors += 1
            if num_bytes >= self._bucket_bytes:
                await self._replica.call("receive_weights", bucket)
                bucket, num_bytes = {}, 0
        if bucket:
            await self._replica.call("receive_weights", bucket)
        last = "commit_weights" if self._takes_turns else "seal_weights"
        await self._replica.call(last, kwargs["global_steps"], num_tensors)
        logger.debug("sent %d tensors in %.3f s", num_tensors, time.perf_counter() - started_s)
