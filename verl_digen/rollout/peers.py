# SPDX-License-Identifier: Apache-2.0
"""Processes of a `diffusers` replica of several devices: the server's peers, one per further device.

    trainer rank k, or worker k of the replica --- calls ---> server (rank 0) --- calls ---> peer k
                    '------------------------- tensors of an update ------------------------>'

- The server is the only one that others speak to. It starts the peers, so Ray ends them with it.
- A peer holds the network alone. In a batch it follows the server's forwards (`verl_digen.rollout.lockstep`); weights
  come to it from the process that shares its device.
- A replica is lost as a whole. A peer whose forward fails ends its process; the server ends its own when a peer dies,
  fails in a call, or does not answer in time. Nothing is mended: a lost replica is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.distributed.device_mesh import DeviceMesh
from verl.plugin.platform import get_platform

from verl_digen.config import DigenConfig
from verl_digen.errors import describe
from verl_digen.models.experts import networks_of
from verl_digen.models.sequence import split_networks
from verl_digen.platforms.module_memory import DeviceMemory, name_on_node
from verl_digen.rollout.birth import SeenDevice, birth_variables, visible_device
from verl_digen.rollout.lockstep import Leader, OutOfStep, find_store, follow, join_group, open_store
from verl_digen.rollout.network import Intake, LoadedNetwork, load_network
from verl_digen.weights.checksum import Manifest
from verl_digen.weights.probe import Probe

logger = logging.getLogger(__name__)

PEER_CONCURRENCY = 100
"""Calls of a peer at a time: the server's, and one per weight update that is watched."""


def end_process(reason: str) -> NoReturn:
    """End this process at once, also while a thread of it waits in a collective."""
    logger.error("the replica is lost: %s", reason)
    os._exit(1)


@dataclass(frozen=True)
class Place:
    """Device of one process of a replica."""

    node_id: str
    device: str
    """Ray's id of the device on its node."""


class Peer:
    """Actor on one further device. See `verl_digen.rollout.server` for the arguments.

    Args:
        rank: >= 1. size: devices of the replica.
    """

    def __init__(self, config: Any, model_config: Any, num_threads: int, rank: int, size: int):
        digen = model_config.digen
        self._rank, self._size, self._timeout_s = rank, size, digen.deadlines.first_s
        self._network = load_network(config, model_config, num_threads)
        self._networks = networks_of(self._network.transformer)
        self._intake = Intake(self._network, digen.rollout.update_timeout_s)
        self._memory = DeviceMemory([self._network.weights.module], self._network.device, name_on_node())
        self._frees_memory = self._network.device.type != "cpu"
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="denoise")

    async def ready(self) -> SeenDevice:
        """The device, once the network is loaded."""
        return visible_device(0)

    async def join(self, port: int) -> None:
        """Form the group with the other ranks; the server's store is at `port`."""

        def join() -> None:
            store = find_store(port, self._timeout_s)
            split_over(join_group(store, self._rank, self._size, self._network.device, self._timeout_s), self._network)

        await self._on_device(join)

    async def stay(self) -> None:
        """Never return: the call fails when this process dies."""
        await asyncio.Event().wait()

    async def follow(self) -> int:
        """Run the server's forwards until its batch ends -> their number. An error ends this process."""
        return await self._on_device(self._follow)

    def _follow(self) -> int:
        try:
            return follow(self._networks, self._network.device)
        except Exception as error:
            logger.exception("a forward failed")
            end_process(f"rank {self._rank} left the forwards of its server: {error!r}")

    # -- weights, as the server's methods -----------------------------------------------------------------
    async def begin_update(self, handle: str, use_shm: bool, is_live: bool) -> None:
        """See `Intake.begin`."""
        await self._intake.begin(handle, use_shm, is_live)

    async def until_update_ends(self) -> None:
        """See `Intake.until_ended`."""
        await self._intake.until_ended()

    async def seal_update(self, manifest: Manifest) -> None:
        """See `Intake.seal`."""
        await self._intake.seal(manifest)

    async def switch(self, version: int) -> None:
        """Load the sealed update, which must be this version."""
        if self._intake.sealed_version != version:
            raise RuntimeError(f"rank {self._rank} has sealed version {self._intake.sealed_version}, not {version}")
        await self._on_device(self._network.weights.switch)

    async def probe(self, version: int, fingerprint: tuple[float, ...]) -> Probe:
        """Report on the loaded weights; the fingerprint is that of all ranks together."""
        return await self._on_device(lambda: self._network.weights.probe(version, fingerprint))

    # -- device memory ------------------------------------------------------------------------------------
    async def sleep(self) -> None:
        """Free the device memory."""
        if self._frees_memory:
            await self._on_device(lambda: release(self._memory, self._network))

    async def wake_up(self) -> None:
        """Allocate the device memory again."""
        if self._memory.is_released:
            await self._on_device(lambda: restore(self._memory))

    async def _on_device(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._compute, function)


def split_over(mesh: DeviceMesh, network: LoadedNetwork) -> None:
    """Let the network's forwards run on one share of a row's tokens per device of `mesh`."""
    split_networks(network.model, network.weights.module, mesh)


def release(memory: DeviceMemory, network: LoadedNetwork) -> None:
    """Free the device memory of a process; its trained weights are undefined until the next update."""
    platform = get_platform()
    platform.synchronize()
    network.fp8.clear()
    memory.release(replaced=network.weights.lose)
    platform.synchronize()
    platform.empty_cache()


def restore(memory: DeviceMemory) -> None:
    """Allocate the device memory of a process again."""
    memory.restore()
    get_platform().synchronize()


def start_peers(places: Sequence[Place], config: Any, model_config: Any, num_threads: int) -> list[Any]:
    """Start a peer at each place, as ranks 1, 2, ... -> their handles; does not wait."""
    return [
        ray.remote(Peer)
        .options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=place.node_id, soft=False),
            runtime_env={"env_vars": birth_variables(place.device)},
            max_concurrency=PEER_CONCURRENCY,
            num_cpus=0,
        )
        .remote(config, model_config, num_threads, rank, len(places) + 1)
        for rank, place in enumerate(places, start=1)
    ]


class Team:
    """The server's handle on its peers; a replica of one device has none.

    Args:
        peers: handles, in the order of their ranks. network: the server's own.
        on_device: runs a function in the server's compute thread, where all collectives are.
    """

    def __init__(
        self,
        peers: Sequence[Any],
        network: LoadedNetwork,
        digen: DigenConfig,
        on_device: Callable[[Callable[[], Any]], Awaitable[Any]],
    ):
        self._peers, self.size = tuple(peers), len(peers) + 1
        self._network, self._on_device, deadlines = network, on_device, digen.deadlines
        self._join_s, self._call_s, self._forward_s = deadlines.start_s, deadlines.load_s, deadlines.first_s
        self._update_s = digen.rollout.update_timeout_s
        self._watches: list[asyncio.Task[None]] = []
        self._leader: Leader | None = None

    async def join(self) -> list[SeenDevice]:
        """Wait until every peer has loaded the network, and form the group -> their devices, by rank.

        Raises:
            RayActorError: a peer could not start. asyncio.TimeoutError: it took longer than `digen.deadlines.start_s`.
        """
        if not self._peers:
            return []
        seen = await asyncio.wait_for(self._ask_all("ready"), self._join_s)
        if not self._watches:
            self._watches = [asyncio.create_task(self._watch(rank)) for rank in range(1, self.size)]
            store = open_store(self._forward_s)
            network = self._network

            def lead() -> None:
                split_over(join_group(store, 0, self.size, network.device, self._forward_s), network)
                self._leader = Leader(networks_of(network.transformer), network.device)

            joined = asyncio.gather(self._on_device(lead), self._ask_all("join", store.port))
            await asyncio.wait_for(joined, self._join_s)
            logger.info("the %d devices of this replica share the tokens of each sample", self.size)
        return seen

    async def _watch(self, rank: int) -> None:
        try:
            await self._peers[rank - 1].stay.remote()
        except RayError as error:
            end_process(f"rank {rank} died: {describe(error)}")

    @contextmanager
    def session(self) -> Iterator[None]:
        """Context in which the network runs on all ranks, in the compute thread; see `Leader.session`."""
        if self._leader is None:
            yield
            return
        followers = [peer.follow.remote() for peer in self._peers]
        try:
            with self._leader.session(lambda: ray.get(followers, timeout=self._forward_s)):
                yield
        except OutOfStep as error:
            logger.exception("a batch failed")
            end_process(str(error))

    async def begin_update(self, rank: int, handle: str, use_shm: bool, is_live: bool) -> None:
        """See `Intake.begin`."""
        await self._bounded(self._peers[rank - 1].begin_update.remote(handle, use_shm, is_live), self._call_s)

    async def seal_update(self, rank: int, manifest: Manifest) -> None:
        """See `Intake.seal`."""
        await self._bounded(self._peers[rank - 1].seal_update.remote(manifest), self._update_s)

    async def until_update_ends(self, rank: int) -> None:
        """See `Intake.until_ended`."""
        await self._peers[rank - 1].until_update_ends.remote()

    async def _bounded(self, answer: Any, timeout_s: float) -> None:
        """Wait for a peer's answer. A peer that gives none in time ends this process; its error is raised."""
        try:
            await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            end_process(f"a peer did not answer within {timeout_s:g} s")

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Every peer's answer, by rank. A peer that fails or does not answer within `digen.deadlines.load_s` ends this
        process: the ranks would not be alike any more."""
        try:
            return await asyncio.wait_for(self._ask_all(method, *args), self._call_s)
        except (RayError, asyncio.TimeoutError) as error:
            end_process(f"{method} failed on a rank, or took longer than digen.deadlines.load_s: {describe(error)}")

    async def _ask_all(self, method: str, *args: Any) -> list[Any]:
        return list(await asyncio.gather(*(getattr(peer, method).remote(*args) for peer in self._peers)))


def require_same_weights(own: Probe, others: Sequence[Probe]) -> None:
    """Raise RuntimeError unless all ranks of a replica have loaded the same weights."""
    for rank, other in enumerate(others, start=1):
        if (other.checksums, other.num_tensors) != (own.checksums, own.num_tensors):
            raise RuntimeError(
                f"every rank of a replica must compute with the same weights, but version {own.version} has "
                f"{own.num_tensors} tensors with checksums {_hex(own)} on rank 0, and {other.num_tensors} with "
                f"{_hex(other)} on rank {rank}; look in the run's log for errors of update_weights"
            )


def _hex(probe: Probe) -> str:
    return ", ".join(f"{each:x}" for each in probe.checksums)
