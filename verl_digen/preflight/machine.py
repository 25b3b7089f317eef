# SPDX-License-Identifier: Apache-2.0
"""Rules for the accelerators of this machine, where it is the whole cluster. Those of a running Ray cluster are
compared once the run has joined it (`verl_digen.platforms.placement`)."""

from __future__ import annotations

import os

import ray
from omegaconf import DictConfig, OmegaConf
from ray._private.services import find_bootstrap_address

from verl_digen.pool_sizes import asked_devices, asked_text
from verl_digen.preflight.pools import COLOCATED
from verl_digen.require import require


def check_machine(config: DictConfig) -> None:
    """Require as many devices as the pools ask for, unless the run joins a Ray cluster, or has no accelerator."""
    from verl.plugin.platform import get_platform

    platform = get_platform()
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address")
    if platform.device_name == "cpu" or joins_cluster(address):
        return
    declared = OmegaConf.select(config, "ray_kwargs.ray_init.num_gpus")
    require_devices(config, platform.device_count() if declared is None else declared)


def require_devices(config: DictConfig, found: int) -> None:
    """Raise ValueError if the pools ask for more than the `found` devices of this machine."""
    asked = asked_devices(config, has_own_replicas=config.trainer.v1.trainer_mode != COLOCATED)
    total = sum(asked.values())
    require(
        total <= found,
        f"{asked_text(asked)} must be <= {found}, the devices of this machine",
        total,
        f"set trainer.n_gpus_per_node to what is there{', shared by the pools' if len(asked) > 1 else ''}, or run on a "
        "Ray cluster (`ray start` on each machine, then RAY_ADDRESS=HEAD:6379 in the environment)",
    )


def joins_cluster(address: str | None) -> bool:
    """True if Ray joins a cluster that runs already; else it makes one of this machine.

    Args:
        address: `ray_kwargs.ray_init.address`; RAY_ADDRESS in the environment comes before it.
    """
    if ray.is_initialized():
        return True
    address = os.environ.get("RAY_ADDRESS") or address
    if address in (None, "auto"):
        return find_bootstrap_address(None) is not None
    return address != "local"
