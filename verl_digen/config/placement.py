# SPDX-License-Identifier: Apache-2.0
"""Placement of pools on a device type (`digen.placement.*`), for clusters with several types.

A type is a resource of the Ray cluster: Ray's `accelerator_type:NAME`, which it detects on most accelerators, or a
custom resource (`ray start --resources='{"NAME": 1}'`). A process requests the smallest share of it and so is placed on
a node that has it. Everything is checked before the first process starts: Ray would wait forever for devices that do
not exist.

Invariant (tests/platforms/test_placement.py): a config that passes `check_placement` can be placed on an idle cluster,
where nodes of a type and their devices are concerned.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.plugin.platform import get_platform
from verl.single_controller.ray.base import ResourcePoolManager

from verl_digen.config import DigenConfig, PoolSettings
from verl_digen.config.pool_sizes import (
    REPLICA_KEY,
    ROLLOUT,
    asked_devices,
    asked_text,
    num_function_devices,
    num_replica_devices,
)
from verl_digen.errors import RunStopped

LEAST_SHARE = 1e-4
"""Smallest share of a resource that Ray counts."""

TIMESHARE = 0.01
"""Share of a device that Ray counts for a process that takes turns on it. Ranks take a third of their bundle's."""

TYPE_PREFIX = "accelerator_type:"
"""Prefix of Ray's resources for nodes of an accelerator type."""

NOT_TYPES = ("CPU", "GPU", "NPU", "memory", "object_store_memory", "node:")
"""Prefixes of resources that every cluster has."""


@dataclass
class TypedPools(ResourcePoolManager):
    """verl's pools of devices, all of one type."""

    accelerator: str | None = None

    def create_resource_pool(self) -> None:
        """Describe the pools; devices are reserved when the first worker of a pool starts."""
        super().create_resource_pool()
        for pool in self.resource_pool_dict.values():
            pool.accelerator_type = type_resource("digen.placement.trainer_accelerator", self.accelerator)


def reward_options(config: Any, digen: DigenConfig) -> dict[str, Any]:
    """Options of a function worker's Ray actor: number of devices (or share of one), and their type."""
    return _device_options(num_function_devices(config) / max(1, config.reward.num_workers), digen)


def pool_options(pool: PoolSettings, digen: DigenConfig) -> dict[str, Any]:
    """Options of the Ray actor of a reward's own pool."""
    return {"num_cpus": 1, **_device_options(pool.num_gpus, digen)}


def timeshared_options(pool: Any) -> list[dict[str, Any]]:
    """Options of the Ray actor of a timeshared reward on each device of a pool: in the bundle of the rank that has it.
    The pool is verl's `RayResourcePool`, reserved: a placement group per node, with a bundle per device."""
    share = share_options(TIMESHARE)
    return [
        {
            "num_cpus": 0,
            **share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        }
        for group in pool.get_placement_groups(device_name=get_platform().device_name)
        for number in range(group.bundle_count)
    ]


def _device_options(share: float, digen: DigenConfig) -> dict[str, Any]:
    options = share_options(share)
    resource = type_resource("digen.placement.reward_accelerator", digen.placement.reward_accelerator)
    if resource is not None:
        options["resources"][resource] = LEAST_SHARE
    return options


def share_options(share: float) -> dict[str, Any]:
    """Options of an actor with this number of devices, or with a share of one."""
    device = get_platform().ray_resource_name()
    if not share or device != "GPU":
        return {"resources": {device: share} if share else {}}
    return {"resources": {}, "num_gpus": share}


def check_placement(config: Any, digen: DigenConfig, *, is_disaggregated: bool) -> None:
    """Check that the cluster has enough devices, every pool's type, and enough devices of it, else raise RunStopped."""
    placement, asked = digen.placement, asked_devices(config, digen, has_own_replicas=is_disaggregated)
    num_trainer, num_generator = asked["trainer"], asked.get(ROLLOUT, 0)
    pools = (
        ("trainer", placement.trainer_accelerator, num_trainer),
        ("generator", placement.generator_accelerator, num_generator),
        ("reward", placement.reward_accelerator, sum(asked.values()) - num_trainer - num_generator),
    )
    needed: Counter[str] = Counter()
    keys: dict[str, list[str]] = {}
    for pool, accelerator, num_devices in pools:
        key = f"digen.placement.{pool}_accelerator"
        resource = type_resource(key, accelerator)
        if resource is not None:
            needed[resource] += num_devices
            keys.setdefault(resource, []).append(f"{key}={accelerator}")
    for resource, count in needed.items():
        found = sum(_device_counts(resource))
        if found < count:
            raise RunStopped(
                f"{' and '.join(keys[resource])} must find {count} devices on nodes with the Ray resource "
                f"{resource!r}, got {found}; ask for fewer devices in these pools, add nodes, or set another type"
            )
    _check_devices(config, asked)


def _check_devices(config: Any, asked: Mapping[str, int]) -> None:
    counts = _device_counts(get_platform().ray_resource_name())
    total = sum(asked.values())
    if sum(counts) < total:
        raise RunStopped(
            f"{asked_text(asked)} must be <= {sum(counts)}, the devices of the Ray cluster, on {len(counts)} nodes, "
            f"got {total}; ask for fewer devices, or add nodes"
        )
    if config.trainer.n_gpus_per_node > max(counts):
        raise RunStopped(
            f"trainer.n_gpus_per_node must be <= {max(counts)}, the devices of the largest node, got "
            f"{config.trainer.n_gpus_per_node}; lower it and raise trainer.nnodes"
        )
    size, num_generator = num_replica_devices(config), asked.get(ROLLOUT, 0)
    found = sum(count // size for count in counts)
    if num_generator > found * size:
        raise RunStopped(
            f"{ROLLOUT}.nnodes x {ROLLOUT}.n_gpus_per_node must be <= {found * size}, the devices of the {found} "
            f"replicas that find room, each in one node, with {REPLICA_KEY}={size}, got {num_generator}; lower either, "
            "or add nodes"
        )


def type_resource(key: str, accelerator: str | None) -> str | None:
    """The cluster's resource for a type; None for any type. RunStopped if the cluster has none of that name."""
    if accelerator is None:
        return None
    resources = ray.cluster_resources()
    for name in (f"{TYPE_PREFIX}{accelerator}", accelerator):
        if name in resources:
            return name
    found = sorted(name.removeprefix(TYPE_PREFIX) for name in resources if not name.startswith(NOT_TYPES))
    types = ", ".join(found) or "it names none"
    raise RunStopped(
        f"{key} must be a type of accelerator that the Ray cluster has ({types}), got {accelerator!r}; "
        "set one of these, null for any, or name the nodes' type with "
        f"`ray start --resources='{{\"{accelerator}\": 1}}'`"
    )


def _device_counts(resource: str) -> list[int]:
    """Devices of each living node that has `resource`, and devices."""
    device = get_platform().ray_resource_name()
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [int(amount[device]) for amount in alive if device in amount and resource in amount]
