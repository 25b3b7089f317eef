# SPDX-License-Identifier: Apache-2.0
"""Replicas whose processes died or hang leave the run, which goes on with the others.

A replica on devices of its own is a server and workers of the checkpoint engine. With one of them dead it is no use:
without the server it cannot generate, without a worker it would generate under old weights.

| a process ... | and so its replica |
| --- | --- |
| died | is lost; its other processes are ended, so that its devices are free |
| gives no sign of life for `digen.deadlines.answer_s` | the same |
| cannot be reached (ActorUnavailableError) | is asked again for `digen.deadlines.blip_s`, then the same |

Invariant (tests/trainer/test_replicas.py): after an update every replica that is left has the weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import remove_placement_group
from verl.workers.rollout.replica import RolloutMode

from verl_digen.actors import sign_of_life
from verl_digen.agent_loop.chunks import describe
from verl_digen.agent_loop.server_manager import ALL_LOST
from verl_digen.errors import RunStopped
from verl_digen.schedulers.deadlines import DeadlinesConfig
from verl_digen.weights.probe import check_probes, check_reached

logger = logging.getLogger(__name__)

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def update_living_replicas(
    checkpoint_manager: Any, server_manager: Any, update: Callable[[], Any], deadlines: DeadlinesConfig, run: Run
) -> None:
    """Have `update` send weights to the replicas; if one dies meanwhile, once more, to those that are left. One that is
    out of reach for a moment has missed its part of the transfer, which the others wait for: it is ended.

    Raises:
        RunStopped: no replica is left. Whatever `update` raises while all of them live.
    """
    forget_lost_replicas(checkpoint_manager, server_manager, deadlines, run)
    while True:
        try:
            update()
        except RayError as error:
            if isinstance(error, ActorUnavailableError):
                _end_replica_of(error.actor_id, checkpoint_manager.replicas)
            if not forget_lost_replicas(checkpoint_manager, server_manager, deadlines, run):
                raise
            logger.warning("sending weights again, to the replicas that are left, after: %s", describe(error))
        else:
            forget_lost_replicas(checkpoint_manager, server_manager, deadlines, run)
            return


def forget_lost_replicas(
    checkpoint_manager: Any, server_manager: Any, deadlines: DeadlinesConfig, run: Run
) -> list[str]:
    """Ask every replica for a sign of life; those without one are ended and left out. Returns their addresses.

    Args:
        checkpoint_manager: verl's `CheckpointEngineManager`. server_manager: verl's `LLMServerManager`.
        run: runs a coroutine in the driver's event loop (`LoopThread.run`).

    Raises:
        RunStopped: no replica is alive.
    """
    lost = run(silent_replicas(checkpoint_manager.replicas, deadlines))
    addresses = [replica.server_address for replica in lost]
    if lost:
        logger.warning("rollout replicas lost: %s; the run goes on without them", ", ".join(addresses))
        for replica in lost:
            end_processes(replica)
        checkpoint_manager.remove_replicas(lost)
        ray.get(server_manager.global_load_balancer.remove_servers.remote(addresses), timeout=deadlines.answer_s)
    if not checkpoint_manager.replicas:
        raise RunStopped(ALL_LOST)
    return addresses


async def silent_replicas(replicas: Sequence[Any], deadlines: DeadlinesConfig) -> list[Any]:
    """Replicas of which a process gives no sign of life; all are asked at once."""

    async def lives(replica: Any) -> bool:
        return all(await asyncio.gather(*(_lives(process, deadlines) for process in _processes(replica))))

    alive = await asyncio.gather(*map(lives, replicas))
    return [replica for replica, is_alive in zip(replicas, alive, strict=True) if not is_alive]


async def _lives(process: Any, deadlines: DeadlinesConfig) -> bool:
    try:
        await sign_of_life(process, deadlines)
    except (RayActorError, asyncio.TimeoutError):
        return False
    return True


def end_processes(replica: Any) -> None:
    """Kill every process of a replica, those that hang too, and give back its devices."""
    for server in replica.servers:
        ray.kill(server)
    if replica.rollout_mode is RolloutMode.STANDALONE:
        for worker in replica.workers:
            ray.kill(worker)
        if replica.resource_pool is not None:  # a virtual replica has none
            for group in replica.resource_pool.pgs:
                remove_placement_group(group)


def _end_replica_of(actor_id: str | None, replicas: Sequence[Any]) -> None:
    """End the replica that one of its processes, by the hexadecimal id of its actor, belongs to; a rank has none."""
    for replica in replicas:
        if any(process._actor_id.hex() == actor_id for process in _processes(replica)):
            end_processes(replica)


def _processes(replica: Any) -> list[Any]:
    """The replica's own ones: the workers of a colocated replica are the trainer's ranks."""
    return [replica.server_handle, *(replica.workers if replica.rollout_mode is RolloutMode.STANDALONE else ())]


def replica_metrics(checkpoint_manager: Any, deadlines: DeadlinesConfig, *, published: int) -> dict[str, float]:
    """Counts and times that the replicas report, after a weight update. A replica that died since is left out.

    | name | unit | meaning |
    | --- | --- | --- |
    | `rollout/num_replicas` | replicas | that are alive |
    | `rollout/weight_load_s_max` | s | the slowest replica's loading of the last update |
    | `rollout/weight_drain_s_max` | s | the longest that an update waited for the trajectories under way |
    | `rollout/prompt_cache_hit_rate` | | share of the prompts that did not have to be encoded, since the run began |
    | `rollout/version_lag_max_versions` | versions | the farthest that a replica is behind the published weights |
    | `rollout/probe_change`, `rollout/probe_spread` | | see `verl_digen.weights.probe.check_probes` |

    Args:
        published: the newest weight version.

    Raises:
        RuntimeError: the weights did not take effect, see `verl_digen.weights.probe`.
        RunStopped: no replica answers.
    """
    asked = [replica.server_handle.check_health.remote() for replica in checkpoint_manager.replicas]
    health_of: dict[str, dict[str, Any]] = {}
    for replica, answer in zip(checkpoint_manager.replicas, asked, strict=True):
        try:
            health_of[replica.server_address] = ray.get(answer, timeout=deadlines.answer_s)
        except (RayActorError, GetTimeoutError) as error:  # left out for good at the next update
            logger.warning("replica %s does not say how it is: %s", replica.server_address, describe(error))
    if not health_of:
        raise RunStopped(ALL_LOST)
    healths = list(health_of.values())
    received = {address: health["received_version"] for address, health in health_of.items()}
    probes = {address: health["probes"] for address, health in health_of.items()}
    hits, misses = (sum(health["prompt_cache"][name] for health in healths) for name in ("hits", "misses"))
    return {
        "rollout/num_replicas": float(len(healths)),
        "rollout/weight_load_s_max": max(_update_s(health, "load_s") for health in healths),
        "rollout/weight_drain_s_max": max(_update_s(health, "drain_s") for health in healths),
        "rollout/prompt_cache_hit_rate": hits / max(1, hits + misses),
        **check_reached(received, [health["version"] for health in healths], published),
        **check_probes(probes),
    }


def _update_s(health: dict[str, Any], name: str) -> float:
    """Seconds of the replica's last update; 0 before its first."""
    last = health["last_update"]
    return last[name] if last else 0.0


def replica_device(checkpoint_manager: Any, deadlines: DeadlinesConfig) -> str | None:
    """The accelerator of the replicas, as the first that answers says; None on a CPU.

    Raises:
        RunStopped: no replica answers.
    """
    for replica in checkpoint_manager.replicas:
        try:
            health: Any = ray.get(replica.server_handle.check_health.remote(), timeout=deadlines.answer_s)
        except (RayActorError, GetTimeoutError) as error:
            logger.warning("replica %s does not say how it is: %s", replica.server_address, describe(error))
        else:
            return health["device"]
    raise RunStopped(ALL_LOST)
