# SPDX-License-Identifier: Apache-2.0
"""Remove replicas whose processes died or hang, and start others in place of them; the run goes on meanwhile.

A replica on devices of its own is a server and workers of the checkpoint engine. If one of them dies it is useless:
without the server it cannot generate, without a worker it would generate under old weights. So it is lost as soon as
one died or does not answer (`processes.actors.silence`); the others are killed, so that its devices are free.

A replica in place of a lost one joins when weights are next published. On its own devices it starts in the background,
under a new number, so that it reuses no name of a lost one; on the trainer's devices it starts between two steps, while
the others sleep, with the rank of the lost one.

Invariants (tests/trainer/test_replicas.py, test_restarts.py): after an update every remaining replica has the weights;
living, starting and ready replicas never exceed the initial number.
"""

import asyncio
import concurrent.futures
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import remove_placement_group
from verl.workers.rollout.replica import RolloutMode

from verl_digen.errors import ReplicasLost, describe
from verl_digen.processes.actors import retried, silence
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.processes.relays import FAN_OUT, Route, Together, Work
from verl_digen.processes.supervision import LoopThread
from verl_digen.store import client

logger = logging.getLogger(__name__)


class Replicas:
    """All replicas of a run. With many processes they are asked through relays, see `verl_digen.processes.relays`.

    Args:
        checkpoint_manager: verl's `CheckpointEngineManager`, which has the list of them.
        server_manager: verl's `LLMServerManager`.
        workers: route to the replicas' workers. Those of colocated replicas are not asked.
        start: starts the replica with this number, which counts the replicas of the run; raises if it cannot.
        max_restarts: limit per run, over all replicas; a failed start counts.
    """

    def __init__(
        self,
        checkpoint_manager: Any,
        server_manager: Any,
        deadlines: DeadlinesConfig,
        loop: LoopThread,
        *,
        workers: Route,
        start: Callable[[int], Awaitable[Any]],
        max_restarts: int,
    ):
        self._checkpoint_manager, self._server_manager = checkpoint_manager, server_manager
        self._deadlines, self._loop = deadlines, loop
        self._servers, self._workers = Route(deadlines.answer_s), workers
        self._start, self._max_restarts = start, max_restarts
        self._starting: list[Any] = []
        self.num_replicas = len(self._all)
        """Initial number; theirs are the numbers below it."""
        self.num_restarts = 0
        """Starts in place of lost ones so far, failed ones included."""

    def tell_living(self, tell: Callable[[], Any]) -> None:
        """Have `tell` send weights to the replicas, or put them to sleep; whenever one dies meanwhile, retry with the
        remaining ones. A replica that is unreachable for a moment has missed its part, which in a transfer the others
        wait for: it is killed. ReplicasLost if none is left; any exception of `tell` while all of them are alive."""
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
        ReplicasLost if no replica is alive."""
        lost = [] if self._all_answer() else self._loop.run(self._silent())
        addresses = [replica.server_address for replica in lost]
        if lost:
            logger.warning("rollout replicas lost: %s; the run goes on without them", ", ".join(addresses))
            for replica in lost:
                end_processes(replica)
            self._checkpoint_manager.remove_replicas(lost)
            if (balancer := self._server_manager.global_load_balancer) is not None:
                ray.get(balancer.remove_servers.remote(addresses), timeout=self._deadlines.answer_s)
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

    # -- starting others ----------------------------------------------------------------------------------
    def replace_lost(self) -> None:
        """Start the missing replicas, within the limit."""
        num_missing = self.num_replicas - len(self._all) - len(self._starting)
        num_allowed = self._max_restarts - self.num_restarts
        if num_missing > num_allowed:
            logger.warning(
                "%d lost replicas stay lost: digen.rollout.max_restarts=%d is used up",
                num_missing - num_allowed,
                self._max_restarts,
            )
        for _ in range(min(num_missing, num_allowed)):
            number = self.num_replicas + self.num_restarts
            self.num_restarts += 1
            logger.warning("replica %d is started in place of a lost one", number)
            self._starting.append(self._loop.begin(asyncio.wait_for(self._start(number), self._deadlines.first_s)))

    def wait_started(self) -> None:
        """Block until every start has succeeded or failed; each has its bound."""
        concurrent.futures.wait(self._starting)

    @property
    def is_starting(self) -> bool:
        """True while a replica is started, or has been and is not added."""
        return bool(self._starting)

    async def one_started(self) -> None:
        """Wait until a start has succeeded or failed; each has its bound."""
        await asyncio.wait([asyncio.wrap_future(one) for one in self._starting], return_when=asyncio.FIRST_COMPLETED)

    def add_started(self) -> None:
        """Add the replicas that have started: they get weights and validation samples from now on."""
        ended = [future for future in self._starting if future.done()]
        self._starting = [future for future in self._starting if future not in ended]
        for future in ended:
            if error := future.exception():
                logger.error("a replica could not be started again: %s", describe(error))
        started = [future.result() for future in ended if future.exception() is None]
        if started:
            self._checkpoint_manager.add_replicas(started)
            servers = {replica.server_address: replica.server_handle for replica in started}
            added = self._server_manager.global_load_balancer.add_servers.remote(servers)
            ray.get(added, timeout=self._deadlines.answer_s)

    # -- their state --------------------------------------------------------------------------------------
    def metrics(self, published: int) -> dict[str, float]:
        """`rollout/*` that the replicas report after a weight update; one that died since is left out. Restarts and
        the hit rate, the share of prompts that did not have to be encoded, are since the run began; the drain is the
        update's wait for trajectories in flight. RuntimeError if a replica did not receive the newest weight version,
        `published`."""
        health_of = self._healths()
        counts = {"rollout/num_restarts": float(self.num_restarts), "rollout/num_replicas": float(len(health_of))}
        if not health_of:  # the next step starts others, or says that it cannot
            return counts
        healths = list(health_of.values())
        for address, health in health_of.items():
            if health["received_version"] != published:
                raise RuntimeError(
                    f"version {published} was published and replica {address} has received "
                    f"{health['received_version']}, so weight updates do not reach it; look in the run's log for "
                    "errors of update_weights and seal_update, and for replicas that are lost"
                )
        updates = [health["last_update"] for health in healths if health["last_update"]]
        hits, misses = (sum(health["prompt_cache"][name] for health in healths) for name in ("hits", "misses"))
        return {
            **counts,
            "rollout/weight_load_s_max": max((update["load_s"] for update in updates), default=0.0),
            "rollout/weight_drain_s_max": max((update["drain_s"] for update in updates), default=0.0),
            "rollout/prompt_cache_hit_rate": hits / max(1, hits + misses),
            "rollout/version_lag_max_versions": float(published - min(health["version"] for health in healths)),
        }

    def device(self) -> str | None:
        """Accelerator of the replicas, as reported by the first that answers; None on a CPU. ReplicasLost if none
        answers."""
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
            return self._loop.run(asyncio.wait_for(callee.call(work, "all"), self._deadlines.answer_s))
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


async def start_replica(server_manager: Any, rank: int, start_s: float, *, on_ranks: bool) -> Any:
    """Start one of the replicas of verl's `LLMServerManager` in place of a lost one, as soon as that one's devices and
    names are free, within `start_s`; with `on_ranks` on the trainer's devices, not on devices of its own."""

    def start() -> Any:
        replica = server_manager.rollout_replica_class(
            replica_rank=rank,
            config=server_manager.rollout_config,
            model_config=server_manager.model_config,
            gpus_per_node=server_manager.rollout_config.n_gpus_per_node,
        )
        init = partial(replica.init_hybrid, server_manager.worker_group) if on_ranks else replica.init_standalone
        asyncio.run(retried(init, start_s, on=ValueError))  # verl's and Ray's, while they are not free
        return replica

    return await asyncio.to_thread(start)  # verl blocks in coroutines


def end_processes(replica: Any) -> None:
    """Kill every process of a replica, hung ones included, and free its devices."""
    for server in replica.servers:
        ray.kill(server)
    if replica.rollout_mode is RolloutMode.STANDALONE:
        for worker in replica.workers:
            ray.kill(worker)
        for group in replica.resource_pool.pgs:
            remove_placement_group(group)


def required_processes(agent_loop_workers: Sequence[Any]) -> dict[str, Any]:
    """Processes beside the replicas without which the run ends and that no deadline covers, by name."""
    named = {f"agent loop worker {number}": worker for number, worker in enumerate(agent_loop_workers)}
    return {**client.processes(), **named}


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
