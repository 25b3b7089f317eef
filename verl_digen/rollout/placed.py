# SPDX-License-Identifier: Apache-2.0
"""Replica placement: on one device type (`digen.placement.generator_accelerator`), in one node, on the devices of its
workers; and CPU threads per replica."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import ray
import torch.distributed
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] - public, says its doc
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.plugin.platform import get_platform
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from verl_digen.platforms.placement import type_resource
from verl_digen.rollout.birth import SeenDevice, assigned_device, require_same_devices, reserved_device


class ReplicaWorker(CheckpointEngineWorker):
    """verl's worker of a replica, alone in its process group, which nothing of ours uses: it needs no port, see
    `verl_digen.engine.rendezvous`."""

    def __init__(self, *args: Any, **kwargs: Any):
        torch.distributed.init_process_group("cpu:gloo", store=HashStore(), rank=0, world_size=1)
        super().__init__(*args, **kwargs)


class PlacedReplica(RolloutReplica):
    """verl's replica; its own devices, if it has any, are of one type and in one node."""

    def get_ray_class_with_init_args(self) -> Any:
        """Hook: verl calls it after describing a standalone replica's pool and before reserving its devices."""
        if self.rollout_mode is RolloutMode.STANDALONE:
            section: Any = self.model_config
            accelerator = section.digen.placement.generator_accelerator
            self.resource_pool.accelerator_type = type_resource("digen.placement.generator_accelerator", accelerator)
            if self.world_size > 1:  # verl would reserve them on several nodes where no node has enough free ones
                self.resource_pool.get_placement_groups(strategy="STRICT_PACK", device_name=get_platform().device_name)
        described = super().get_ray_class_with_init_args()
        described.cls = ray.remote(ReplicaWorker)
        return described

    async def require_devices(self, seen: Sequence[SeenDevice]) -> None:
        """Require that the replica's engine runs on the devices of its workers, in their order.

        Raises:
            RuntimeError: it does not; says which devices both see.
        """
        look = reserved_device if self.rollout_mode is RolloutMode.STANDALONE else assigned_device
        reserved = await asyncio.gather(*(worker.__ray_call__.remote(lambda _: look()) for worker in self.workers))
        require_same_devices(f"replica {self.replica_rank}", reserved, seen)


def cpu_threads(*, num_neighbours: int, num_devices: int, is_standalone: bool) -> int:
    """CPU threads per device of a replica, on a machine whose devices are its CPU's cores.

    Args:
        num_neighbours: trainer ranks on the node.
        num_devices: devices of the node's replicas.
        is_standalone: False where replicas and trainer alternate; then the running replicas have all cores.
    """
    num_sharing = num_devices + (num_neighbours if is_standalone else 0)
    return max(1, len(os.sched_getaffinity(0)) // num_sharing)
