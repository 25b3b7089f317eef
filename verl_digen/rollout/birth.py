# SPDX-License-Identifier: Apache-2.0
"""Birth of a replica: its placement on devices of one type in one node, the environment of its processes, and the check
that they run on the devices that were reserved for them.

A driver reads the visible-devices variable once, when it starts, and importing a module may start it: verl asks
`torch.cuda.is_available()` at import. So the process is started with the variable; setting it later has no effect.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch.distributed
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] - public, says its doc
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.plugin.platform import get_platform
from verl.utils.device import set_expandable_segments
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from verl_digen.config.placement import type_resource
from verl_digen.processes.actors import MAX_CALLS

LAUNCHER_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
)
"""Variables by which torchrun describes its process group; SLURM scripts set the first ones by hand. Every process of
the Ray cluster inherits them, if `ray start` ran below them, and a replica's workers would meet there."""


def birth_variables(devices: str) -> dict[str, str]:
    """Environment variables of an actor that is to see `devices`, which Ray did not give to it, and no others."""
    platform = get_platform()
    return {**dict.fromkeys(platform.ray_noset_envvars(), "1"), platform.visible_devices_envvar(): devices}


def drop_launcher_variables() -> None:
    """Remove the variables of a process group that this process is not part of."""
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)


class BornOnDevices:
    """Actor class for verl's `launch_servers`; each actor's process starts with its `cuda_visible_devices` visible.
    `server_class` has verl's constructor; `options` are the actor's, as for `ray.remote`."""

    def __init__(self, server_class: type[Any], **options: Any):
        self._server_class, self._options = server_class, options

    def options(self, **options: Any) -> "BornOnDevices":
        """An actor class with more options."""
        return BornOnDevices(self._server_class, **(self._options | options))

    def remote(self, *, cuda_visible_devices: str, **arguments: Any) -> Any:
        """Start the actor."""
        given = self._options["runtime_env"]
        env_vars = {**given["env_vars"], **birth_variables(cuda_visible_devices)}
        actor = ray.remote(self._server_class).options(
            **(self._options | {"runtime_env": {**given, "env_vars": env_vars}})
        )
        return actor.remote(cuda_visible_devices=cuda_visible_devices, **arguments)


@dataclass(frozen=True)
class SeenDevice:
    """A device as one process sees it."""

    name: str
    """Ray's id of the device on its node, or the process's entry of the visible-devices variable."""
    uuid: str | None
    """The driver's UUID, which is the same in every process; None if the platform has none, as a CPU, or if the process
    does not compute on it."""


def reserved_device(*, computes: bool = False) -> SeenDevice:
    """The device that Ray gave to this process, without a UUID unless it `computes`: else its driver is left alone."""
    (name, *_) = ray.get_runtime_context().get_accelerator_ids()[get_platform().ray_resource_name()]
    return SeenDevice(name, _uuid(get_platform().current_device()) if computes else None)


def visible_device(index: int) -> SeenDevice:
    """Device `index` of those that are visible to this process."""
    variable = get_platform().visible_devices_envvar()
    names = os.environ[variable].split(",") if variable in os.environ else []
    return SeenDevice(names[index] if index < len(names) else f"no {variable}", _uuid(index))


def _uuid(index: Any) -> str | None:
    platform = get_platform()
    if platform.device_name != "cuda":
        return None
    return str(platform.device_module.get_device_properties(index).uuid)


def require_same_devices(replica: str, reserved: Sequence[SeenDevice], seen: Sequence[SeenDevice]) -> None:
    """Raise RuntimeError unless a replica computes on the devices reserved for it; says what was seen. `reserved`:
    devices of its workers; of colocated replicas, these are the trainer's ranks. `seen`: by its engine."""
    is_same = len(reserved) == len(seen) and all(
        want.name == have.name and (want.uuid is None or want.uuid == have.uuid)
        for want, have in zip(reserved, seen, strict=True)
    )
    if not is_same:
        raise RuntimeError(
            f"{replica} must compute on the devices of its workers, {_listed(reserved)}, got {_listed(seen)}; its "
            f"process must start with {get_platform().visible_devices_envvar()} set and find the same devices under "
            "the same numbers as the others of its node: set neither the variable nor a device order in the job's "
            "environment (ray_kwargs.ray_init.runtime_env) or in a sitecustomize"
        )


def _listed(devices: Sequence[SeenDevice]) -> str:
    return " and ".join(one.name + (f" ({one.uuid})" if one.uuid else "") for one in devices) or "none"


class ReplicaWorker(CheckpointEngineWorker):
    """verl's worker of a replica, alone in its process group, which nothing of ours uses: it needs no port, see
    `verl_digen.engine.rendezvous`."""

    def __init__(self, *args: Any, **kwargs: Any):
        set_expandable_segments(False)  # a process needs ptrace's rights, which containers deny, to open theirs by IPC
        torch.distributed.init_process_group("cpu:gloo", store=HashStore(), rank=0, world_size=1)
        super().__init__(*args, **kwargs)


class PlacedReplica(RolloutReplica):
    """verl's replica; its own devices, if it has any, are of one type and in one node."""

    @property
    def max_concurrency(self) -> int:
        """Calls that a server takes at a time: the samples of a step, each of which waits in one, and signs of life."""
        return MAX_CALLS

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
        """Require that the replica's engine runs on the devices of its workers, in their order."""
        computes = self.rollout_mode is not RolloutMode.STANDALONE
        asked = [worker.__ray_call__.remote(lambda _: reserved_device(computes=computes)) for worker in self.workers]
        reserved = await asyncio.gather(*asked)
        require_same_devices(f"replica {self.replica_rank}", reserved, seen)


def cpu_threads(num_neighbours: int, num_devices: int, mode: RolloutMode) -> int:
    """CPU threads per device of a replica, on a machine whose devices are its CPU's cores; 0 on others: torch's
    default. `num_neighbours`: trainer ranks on the node. `num_devices`: devices of the node's replicas. Where replicas
    and trainer alternate, the running replicas have all cores."""
    if get_platform().device_name != "cpu":
        return 0
    num_sharing = num_devices + (num_neighbours if mode == RolloutMode.STANDALONE else 0)
    return max(1, len(os.sched_getaffinity(0)) // num_sharing)
