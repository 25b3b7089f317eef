# SPDX-License-Identifier: Apache-2.0
"""Replicas whose processes died leave the run, which goes on with the others."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import RayActorError

from verl_digen.agent_loop.server_manager import ALL_LOST
from verl_digen.errors import RunStopped

logger = logging.getLogger(__name__)


def forget_lost_replicas(checkpoint_manager: Any, server_manager: Any) -> int:
    """Ask every replica's server for a sign of life; nobody talks to those without one any more.

    Args:
        checkpoint_manager: verl's `CheckpointEngineManager`. server_manager: verl's `LLMServerManager`.

    Returns:
        Number of replicas that are left.

    Raises:
        RunStopped: none is.
    """
    signs = [(replica, replica.server_handle.__ray_ready__.remote()) for replica in checkpoint_manager.replicas]
    lost = [replica for replica, sign in signs if not _arrives(sign)]
    if lost:
        addresses = [replica.server_address for replica in lost]
        logger.warning("rollout replicas lost: %s; the run goes on without them", ", ".join(addresses))
        checkpoint_manager.remove_replicas(lost)
        ray.get(server_manager.global_load_balancer.remove_servers.remote(addresses))
    if not checkpoint_manager.replicas:
        raise RunStopped(ALL_LOST)
    return len(checkpoint_manager.replicas)


def _arrives(sign: Any) -> bool:
    try:
        ray.get(sign)
    except RayActorError:
        return False
    return True
