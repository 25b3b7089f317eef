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


def forget_lost_replicas(checkpoint_manager: Any, server_manager: Any) -> None:
    """Ask every replica's server for a sign of life; nobody talks to those without one any more.

    Args:
        checkpoint_manager: verl's `CheckpointEngineManager`. server_manager: verl's `LLMServerManager`.

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


def replica_metrics(checkpoint_manager: Any) -> dict[str, float]:
    """What replicas tell of themselves, after a weight update.

    | name | unit | meaning |
    | --- | --- | --- |
    | `rollout/num_replicas` | replicas | that are alive |
    | `rollout/weight_load_s_max` | s | the slowest replica's loading of the last update |
    | `rollout/weight_drain_s_max` | s | the longest that an update waited for the trajectories under way |
    | `rollout/prompt_cache_hit_rate` | | share of the prompts that did not have to be encoded, since the run began |
    """
    healths = ray.get([replica.server_handle.check_health.remote() for replica in checkpoint_manager.replicas])
    hits, misses = (sum(health["prompt_cache"][name] for health in healths) for name in ("hits", "misses"))
    return {
        "rollout/num_replicas": float(len(healths)),
        "rollout/weight_load_s_max": max(health["last_update"]["load_s"] for health in healths),
        "rollout/weight_drain_s_max": max(health["last_update"]["drain_s"] for health in healths),
        "rollout/prompt_cache_hit_rate": hits / max(1, hits + misses),
    }


def _arrives(sign: Any) -> bool:
    try:
        ray.get(sign)
    except RayActorError:
        return False
    return True
