# SPDX-License-Identifier: Apache-2.0
"""Remove replicas whose processes died or hang; the run goes on with the others.

A replica on devices of its own is a server and workers of the checkpoint engine. If one of them dies it is useless:
without the server it cannot generate, without a worker it would generate under old weights.

| a process ... | its replica ... |
| --- | --- |
| died | is lost; its other processes are killed, so that its devices are free |
| does not answer for `digen.deadlines.answer_s` | the same |
| cannot be reached (ActorUnavailableError) | is retried for a quarter of `digen.deadlines.answer_s`, then the same |

Invariant (tests/trainer/test_replicas.py): after an update every remaining replica has the weights.
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

from verl_digen.agent_loop.chunks import describe
from verl_digen.errors import ReplicasLost
from verl_digen.processes.actors import silence
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.processes.relays import FAN_OUT, Route, Together, Work

logger = logging.getLogger(__name__)

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Replicas:
    """All replicas of a run. With many processes they are asked through relays, see `verl_digen.processes.relays`.

    Args:
        checkpoint_manager: verl's `CheckpointEngineManager`, which has the list of them.
        server_manager: verl's `LLMServerManager`.
        workers: route to the replicas' workers. Those of colocated replicas are not asked.
        run: runs a coroutine in the driver's event loop (`LoopThread.run`).
    """

    def __init__(
        self, checkpoint_manager: Any, server_manager: Any, deadlines: DeadlinesConfig, run: Run, *, workers: Route
    ):
        self._checkpoint_manager, self._server_manager = checkpoint_manager, server_manager
        self._deadlines, self._run = deadlines, run
        self._servers, self._workers = Route(deadlines.answer_s), workers

    def tell_living(self, tell: Callable[[], Any]) -> None:
        """Have `tell` send weights to the replicas, or put them to sleep; whenever one dies meanwhile, retry with the
        remaining ones. A replica that is unreachable for a moment has missed its part, which in a transfer the others
        wait for: it is killed.

        Raises:
            ReplicasLost: no replica is left. Any exception of `tell` while all of them are alive.
        """
        self.forget_lost()
        while True:
            try:
                tell()
            except RayError as error:
                if isinstance(error, ActorUnavailableError) and not _end_replica_of(error, self._all):
                    raise  # a trainer rank: the others wait for it in the transfer that it missed
                if not self.forget_lost():
                    raise
                logger.warning("the replicas that are left are called again, after: %s", describe(error))
            else:
                self.forget_lost()
                return

    def forget_lost(self) -> list[str]:
        """Ask every replica for a heartbeat; those that do not answer are killed and left out. Returns their addresses.

        Raises:
            ReplicasLost: no replica is alive.
        """
        lost = [] if self._all_answer() else self._run(self._silent())
        addresses = [replica.server_address for replica in lost]
        if lost:
            logger.warning("rollout replicas lost: %s; the run goes on without them", ", ".join(addresses))
            for replica in lost:
                end_processes(replica)
            self._checkpoint_manager.remove_replicas(lost)
            removed = self._server_manager.global_load_balancer.remove_servers.remote(addresses)
            ray.get(removed, timeout=self._deadlines.answer_s)
        if not self._all:
            raise ReplicasLost
        return addresses

    async def end_silent(self) -> list[str]:
        """Kill the replicas that do not answer -> their addresses."""
        silent = await self._silent()
        for replica in silent:
            end_processes(replica)
        return [replica.server_address for replica in silent]

    def end_all(self) -> None:
        """Kill every process of every replica, and the relays to them: a call that waits for one raises."""
        self._servers.end()
        self._workers.end()
        for replica in self._all:
            end_processes(replica)

    def metrics(self, published: int) -> dict[str, float]:
        """Counts and times that the replicas report after a weight update. A replica that died since is left out.

        | name | unit | meaning |
        | --- | --- | --- |
        | `rollout/num_replicas` | replicas | replicas alive |
        | `rollout/weight_load_s_max` | s | loading time of the last update on the slowest replica |
        | `rollout/weight_drain_s_max` | s | longest wait of an update for trajectories in flight |
        | `rollout/prompt_cache_hit_rate` | | share of prompts that did not have to be encoded, since the run began |
        | `rollout/version_lag_max_versions` | versions | largest lag of a replica behind the published weights |

        Args:
            published: the newest weight version.

        Raises:
            RuntimeError: a replica did not receive the published version.
        """
        health_of = self._healths()
        if not health_of:  # the next step starts others, or says that it cannot
            return {"rollout/num_replicas": 0.0}
        healths = list(health_of.values())
        for address, health in health_of.items():
            if health["received_version"] != published:
                raise RuntimeError(
                    f"version {published} was published and replica {address} has received "
                    f"{health['received_version']}, so weight updates do not reach it; look in the run's log for "
                    "errors of update_weights and seal_update, and for replicas that are lost"
                )
        hits, misses = (sum(health["prompt_cache"][name] for health in healths) for name in ("hits", "misses"))
        return {
            "rollout/num_replicas": float(len(healths)),
            "rollout/weight_load_s_max": max(_update_s(health, "load_s") for health in healths),
            "rollout/weight_drain_s_max": max(_update_s(health, "drain_s") for health in healths),
            "rollout/prompt_cache_hit_rate": hits / max(1, hits + misses),
            "rollout/version_lag_max_versions": float(published - min(health["version"] for health in healths)),
        }

    def device(self) -> str | None:
        """Accelerator of the replicas, as reported by the first that answers; None on a CPU.

        Raises:
            ReplicasLost: no replica answers.
        """
        for replica in self._all:
            for health in _ask_each([replica], self._deadlines.answer_s).values():
                return health["device"]
        raise ReplicasLost

    @property
    def _all(self) -> Sequence[Any]:
        return self._checkpoint_manager.replicas

    def _all_answer(self) -> bool:
        """Return True if every process answered through relays. False says nothing about any one of them."""
        servers = [replica.server_handle for replica in self._all]
        workers = [worker for replica in self._all for worker in _workers(replica)]
        ways = (self._servers, servers), (self._workers, workers)
        return self._through_relays(Work("__ray_ready__"), ways) is not None

    def _healths(self) -> dict[str, dict[str, Any]]:
        """Address -> state of each replica that answers."""
        ways = [(self._servers, [replica.server_handle for replica in self._all])]
        answers = self._through_relays(Work("check_health"), ways)
        if answers is None:
            return _ask_each(self._all, self._deadlines.answer_s)
        return {replica.server_address: health for replica, health in zip(self._all, answers, strict=True)}

    def _through_relays(self, work: Work, ways: Sequence[tuple[Route, Sequence[Any]]]) -> list[Any] | None:
        """Call many processes -> their answers. None if they are few, if one fails, or if one does not answer in time:
        then each is called directly, which tells who it is."""
        if sum(len(actors) for _, actors in ways) <= FAN_OUT:
            return None
        try:
            callee = Together([route.to(actors) for route, actors in ways])
            return self._run(asyncio.wait_for(callee.call(work, "all"), self._deadlines.answer_s))
        except (RayError, asyncio.TimeoutError) as error:
            logger.warning("a replica's process or a relay fails, each is asked by itself: %s", describe(error))
            for route, _ in ways:
                route.end()  # a relay may be dead: the next call finds another way
            return None

    async def _silent(self) -> list[Any]:
        """Replicas with a process that does not answer; all are asked at once."""
        replicas = self._all
        processes = [process for replica in replicas for process in _processes(replica)]
        errors = await asyncio.gather(*(silence(process, self._deadlines) for process in processes))
        silent = [process for process, error in zip(processes, errors, strict=True) if error is not None]
        return [replica for replica in replicas if any(process in silent for process in _processes(replica))]


def end_processes(replica: Any) -> None:
    """Kill every process of a replica, hung ones included, and free its devices."""
    for server in replica.servers:
        ray.kill(server)
    if replica.rollout_mode is RolloutMode.STANDALONE:
        for worker in replica.workers:
            ray.kill(worker)
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
    return [replica.server_handle, *_workers(replica)]


def _workers(replica: Any) -> Sequence[Any]:
    return replica.workers if replica.rollout_mode is RolloutMode.STANDALONE else ()


def _ask_each(replicas: Sequence[Any], answer_s: float) -> dict[str, dict[str, Any]]:
    """Address -> state of each replica that answers in time."""
    asked = [replica.server_handle.check_health.remote() for replica in replicas]
    healths: dict[str, dict[str, Any]] = {}
    for replica, answer in zip(replicas, asked, strict=True):
        try:
            healths[replica.server_address] = ray.get(answer, timeout=answer_s)
        except (RayActorError, GetTimeoutError) as error:  # removed at the next update
            logger.warning("replica %s does not say how it is: %s", replica.server_address, describe(error))
    return healths


def _update_s(health: dict[str, Any], name: str) -> float:
    """Seconds of the replica's last update; 0 before its first."""
    last = health["last_update"]
    return last[name] if last else 0.0
