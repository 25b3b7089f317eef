# SPDX-License-Identifier: Apache-2.0
"""Replicas whose processes died leave the run, which goes on with the others.

A replica on devices of its own is a server and workers of the checkpoint engine. With one of them dead it is no use:
without the server it cannot generate, without a worker it would generate under old weights for ever.

Invariant (tests/trainer/test_replicas.py): after an update every replica that is left has the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from verl.workers.rollout.replica import RolloutMode

from verl_digen.agent_loop.chunks import describe
from verl_digen.agent_loop.server_manager import ALL_LOST
from verl_digen.errors import RunStopped

logger = logging.getLogger(__name__)


def update_living_replicas(checkpoint_manager: Any, server_manager: Any, update: Callable[[], Any]) -> None:
    """Have `update` send weights to the replicas; if one dies meanwhile, once more, to those that are left.

    Raises:
        RunStopped: no replica is left. Whatever `update` raises while all of them live.
    """
    forget_lost_replicas(checkpoint_manager, server_manager)
    while True:
        try:
            update()
        except RayError as error:
            if not forget_lost_replicas(checkpoint_manager, server_manager):
                raise
            logger.warning("sending weights again, to the replicas that are left, after: %s", describe(error))
        else:
            forget_lost_replicas(checkpoint_manager, server_manager)
            return


def forget_lost_replicas(checkpoint_manager: Any, server_manager: Any) -> list[str]:
    """Ask every replica for a sign of life; nobody talks to those without one any more. Returns their addresses.

    Args:
        checkpoint_manager: verl's `CheckpointEngineManager`. server_manager: verl's `LLMServerManager`.

    Raises:
        RunStopped: none is.
    """
    signs = [
        (replica, [process.__ray_ready__.remote() for process in _processes(replica)])
        for replica in checkpoint_manager.replicas
    ]
    lost = [replica for replica, signs_of_it in signs if not all(map(_arrives, signs_of_it))]
    addresses = [replica.server_address for replica in lost]
    if lost:
        logger.warning("rollout replicas lost: %s; the run goes on without them", ", ".join(addresses))
        checkpoint_manager.remove_replicas(lost)
        ray.get(server_manager.global_load_balancer.remove_servers.remote(addresses))
    if not checkpoint_manager.replicas:
        raise RunStopped(ALL_LOST)
    return addresses


def _processes(replica: Any) -> list[Any]:
    """The trainer's ranks, which are the workers of a colocated replica, are not counted among them."""
    return [replica.server_handle, *(replica.workers if replica.rollout_mode is RolloutMode.STANDALONE else ())]


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


def replica_device(checkpoint_manager: Any) -> str | None:
    """The accelerator of the first replica; None on a CPU."""
    health: Any = ray.get(checkpoint_manager.replicas[0].server_handle.check_health.remote())
    return health["device"]


def _arrives(sign: Any) -> bool:
    try:
        ray.get(sign)
    except RayActorError:
        return False
    return True
