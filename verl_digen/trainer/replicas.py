# SPDX-License-Identifier: Apache-2.0
"""Remove replicas whose processes died or hang; the run goes on with the others.

A replica on devices of its own is a server and workers of the checkpoint engine. If one of them dies it is useless:
without the server it cannot generate, without a worker it would generate under old weights.

| a process ... | its replica ... |
| --- | --- |
| died | is lost; its other processes are killed, so that its devices are free |
| does not answer for `digen.deadlines.answer_s` | the same |
| cannot be reached (ActorUnavailableError) | is retried for `digen.deadlines.blip_s`, then the same |

Invariant (tests/trainer/test_replicas.py): after an update every remaining replica has the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import remove_placement_group
from verl.workers.rollout.replica import RolloutMode

from verl_digen.actors import alive
from verl_digen.agent_loop.chunks import describe
from verl_digen.agent_loop.server_manager import ALL_LOST
from verl_digen.errors import RunStopped
from verl_digen.schedulers.deadlines import DeadlinesConfig
from verl_digen.weights.probe import check_probes, check_reached

logger = logging.getLogger(__name__)

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def tell_living_replicas(
    checkpoint_manager: Any, server_manager: Any, tell: Callable[[], Any], deadlines: DeadlinesConfig, run: Run
) -> None:
    """Have `tell` send weights to the replicas, or put them to sleep; whenever one dies meanwhile, retry with the
    remaining ones. A replica that is unreachable for a moment has missed its part, which in a transfer the others wait
    for: it is killed.

    Raises:
        RunStopped: no replica is left. Any exception of `tell` while all of them are alive.
    """
    forget_lost_replicas(checkpoint_manager, server_manager, deadlines, run)
    while True:
        try:
            tell()
        except RayError as error:
            if isinstance(error, ActorUnavailableError) and not _end_replica_of(error, checkpoint_manager.replicas):
                raise  # a trainer rank: the others wait for it in the transfer that it missed
            if not forget_lost_replicas(checkpoint_manager, server_manager, deadlines, run):
                raise
            logger.warning("the replicas that are left are called again, after: %s", describe(error))
        else:
            forget_lost_replicas(checkpoint_manager, server_manager, deadlines, run)
            return


def forget_lost_replicas(
    checkpoint_manager: Any, server_manager: Any, deadlines: DeadlinesConfig, run: Run
) -> list[str]:
    """Ask every replica for a heartbeat; those that do not answer are killed and left out. Returns their addresses.

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
    """Replicas with a process that does not answer; all are asked at once."""
    processes = [process for replica in replicas for process in _processes(replica)]
    lives = await alive(processes, deadlines)
    silent = [process for process, is_alive in zip(processes, lives, strict=True) if not is_alive]
    return [replica for replica in replicas if any(process in silent for process in _processes(replica))]


def end_processes(replica: Any) -> None:
    """Kill every process of a replica, hung ones included, and free its devices."""
    for server in replica.servers:
        ray.kill(server)
    if replica.rollout_mode is RolloutMode.STANDALONE:
        for worker in replica.workers:
            ray.kill(worker)
        if replica.resource_pool is not None:  # a virtual replica has none
            for group in replica.resource_pool.pgs:
                remove_placement_group(group)


def _end_replica_of(error: ActorUnavailableError, replicas: Sequence[Any]) -> bool:
    """Kill the replica with the actor that could not be reached; False if none has it, as of a trainer rank."""
    for replica in replicas:
        if any(process._actor_id.hex() == error.actor_id for process in _processes(replica)):
            end_processes(replica)
            return True
    return False


def _processes(replica: Any) -> list[Any]:
    """The replica's own processes. The workers of a colocated replica are the trainer's ranks and do not count."""
    return [replica.server_handle, *(replica.workers if replica.rollout_mode is RolloutMode.STANDALONE else ())]


def replica_metrics(checkpoint_manager: Any, deadlines: DeadlinesConfig, *, published: int) -> dict[str, float]:
    """Counts and times that the replicas report after a weight update. A replica that died since is left out.

    | name | unit | meaning |
    | --- | --- | --- |
    | `rollout/num_replicas` | replicas | replicas alive |
    | `rollout/weight_load_s_max` | s | loading time of the last update on the slowest replica |
    | `rollout/weight_drain_s_max` | s | longest wait of an update for trajectories in flight |
    | `rollout/prompt_cache_hit_rate` | | share of prompts that did not have to be encoded, since the run began |
    | `rollout/version_lag_max_versions` | versions | largest lag of a replica behind the published weights |
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
        except (RayActorError, GetTimeoutError) as error:  # removed at the next update
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
    """Accelerator of the replicas, as reported by the first that answers; None on a CPU.

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
