# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.name=diffusers`: one server actor per replica, on the device of its worker, and the
trainer-side sender. The rank that has the server's device sends it all new weights, by CUDA IPC or in shared memory
(`verl_digen.weights.sending`); Ray carries calls alone. A replica may die in an update: a rank then joins the
collectives and sends nothing."""

import logging
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from typing import Any
from uuid import uuid4

import ray
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import is_support_ipc
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.utils import ensure_async_iterator

from verl_digen.processes.actors import retried
from verl_digen.rollout.birth import PlacedReplica, birth_variables, cpu_threads, reserved_device
from verl_digen.rollout.server import DiffusersServer
from verl_digen.weights.checksum import Manifest
from verl_digen.weights.sending import ReceiverDied, Wire, bytes_beside_server, send_update

logger = logging.getLogger(__name__)


def server_name(replica_rank: int) -> str:
    """The Ray actor name under which trainer ranks find the server they send weights to."""
    return f"digen_diffusers_server_{replica_rank}"


class DiffusersReplica(PlacedReplica):
    """A replica of one device that denoises with the diffusers transformer and the project's sampler."""

    server_class: type[Any] = DiffusersServer

    async def launch_servers(self) -> None:
        """Start the server on the node and device of the replica's worker, and wait until the model is loaded."""
        model_config = omega_conf_to_dataclass(self.model_config)
        num_threads = cpu_threads(model_config.digen.rollout.num_neighbours, self.gpus_per_node, self.rollout_mode)
        generates = self.rollout_mode is RolloutMode.STANDALONE  # while an update arrives
        reserved_bytes = bytes_beside_server(self.config.checkpoint_engine) if generates else 0
        (worker,) = self.workers
        node_id, device = await worker.__ray_call__.remote(
            lambda _: (ray.get_runtime_context().get_node_id(), reserved_device().name)
        )
        server: Any = (
            ray.remote(self.server_class)
            .options(
                name=server_name(self.replica_rank),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                runtime_env={"env_vars": birth_variables(device)},
                max_concurrency=self.max_concurrency,
                num_cpus=0,
            )
            .remote(
                config=self.config, model_config=model_config, num_threads=num_threads, reserved_bytes=reserved_bytes
            )
        )
        await self.require_devices(await server.visible_devices.remote())
        self.servers = [server]
        self._server_handle = server
        self._server_address = server_name(self.replica_rank)


class ReplicaHandle:
    """Handle on one replica's server, found by its actor's name at the first call. A call may be retried, so methods
    must be idempotent. A server that is unreachable for longer than `blip_s` is killed: it would miss weights."""

    def __init__(self, name: str, blip_s: float):
        self.name = name
        self.is_lost = False
        self._blip_s = blip_s
        self._actor: Any = None

    def find_successor(self) -> None:
        """Switch to the server that replaced a lost one, if it has started."""
        if self.is_lost and (actor := _find(self.name)) not in (None, self._actor):
            self._actor, self.is_lost = actor, False

    async def call(self, method: str, *args: Any) -> Any:
        """The method's answer; None if the replica is lost (with a warning the first time)."""
        if self.is_lost:
            return None
        try:
            actor = self._look_up()
            return await retried(lambda: getattr(actor, method).remote(*args), self._blip_s)
        except RayActorError as error:
            self._lose(error)
            if isinstance(error, ActorUnavailableError):
                ray.kill(actor)
            return None

    async def update(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]],
        wire: Wire,
        version: int,
        *further: Any,
        address: str,
        takes_turns: bool,
        leads: bool = True,
    ) -> None:
        """Send an update to one worker of the replica, between the calls that begin it, with `address`, and end it,
        with the manifest and `further`. A server on its own devices stages it until `activate_weights`; one that takes
        turns with the trainer commits it. Without `leads` a rank only sends: another one calls the server. All
        `weights` are materialised, also if the replica is lost, because making one is a collective. Raises as
        `send_update`."""
        started_s = time.perf_counter()
        if leads:
            self.find_successor()
            await self.call("begin_update", address, wire.use_shm, wire.is_live, uuid4().hex)
        if self.is_lost:
            return await drain(weights)
        try:
            total = await send_update(weights, wire, receiver=self.name, has_died=self._watch())
        except (ReceiverDied, RayActorError) as error:
            self._lose(error)
            return await drain(weights)
        if leads:
            manifest = Manifest(version, total.num_tensors, total.value)
            await self.call("commit_update" if takes_turns else "seal_update", manifest, *further)
            logger.debug("sent %d tensors in %.3f s", total.num_tensors, time.perf_counter() - started_s)

    def _watch(self) -> Callable[[], bool]:
        """Predicate that is True once the server has died. It does not wait, and may be called while the event loop is
        blocked: it looks at a call that ends no earlier than the update."""
        pending: Future[Any] = self._look_up().until_update_ends.remote().future()
        return lambda: pending.done() and isinstance(pending.exception(), ActorDiedError)

    def _lose(self, error: Exception) -> None:
        logger.warning("replica %s is lost and gets no more weights: %s", self.name, error)
        self.is_lost = True

    def _look_up(self) -> Any:
        self._actor = self._actor or _find(self.name)
        if self._actor is None:
            raise RayActorError
        return self._actor


def _find(name: str) -> Any:
    """The actor with this name; None if it died and Ray has forgotten it, and there is no new one yet."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


async def drain(weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]]) -> None:
    """Materialise and drop every tensor; making one is a collective of all ranks."""
    async for _ in ensure_async_iterator(weights):
        pass


class DiffusersServerAdapter(BaseRollout):
    """verl's per-rank handle on the rollout; constructor and methods are verl's."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **kwargs: Any):
        super().__init__(config, model_config, device_mesh, **kwargs)
        # a replica on its own devices has an explicit rank and switches on request
        self._takes_turns = replica_rank < 0
        self.replica_rank = torch.distributed.get_rank() if self._takes_turns else replica_rank
        self.is_leader_rank = True  # verl asks; a replica has one rank
        digen = self.model_config.digen
        self._timeout_s = digen.rollout.update_timeout_s
        self._replica = ReplicaHandle(server_name(self.replica_rank), digen.deadlines.blip_s)

    async def resume(self, tags: list[str]) -> None:
        """Wake the server before its weights are replaced."""
        if "weights" in tags:
            self._replica.find_successor()
            await self._replica.call("wake_up")

    async def release(self) -> None:
        """Put the server to sleep."""
        await self._replica.call("sleep")

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]], **kwargs: Any
    ) -> None:
        """Send all `weights` as version `global_steps`, see `ReplicaHandle.update`. RuntimeError if the server found a
        tensor missing, unknown or of another shape, or took none for `digen.rollout.update_timeout_s`."""
        version, takes_turns = kwargs["global_steps"], self._takes_turns
        with tempfile.TemporaryDirectory(prefix="digen-weights-") as folder:  # readable by this user alone
            handle, use_shm = f"ipc://{folder}/update.sock", not is_support_ipc()
            wire = Wire.of_run(handle, self.config, self._timeout_s, use_shm=use_shm, is_live=takes_turns)
            await self._replica.update(weights, wire, version, address=wire.handle, takes_turns=takes_turns)


class NoWeightsSent(BaseRollout):
    """verl's handle of a rank that generates itself, see `DiffusionWorker.update_weights`."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **kwargs: Any):
        super().__init__(config, model_config, device_mesh, **kwargs)
        self.server = ReplicaHandle(server_name(0), self.model_config.digen.deadlines.blip_s)

    async def resume(self, tags: list[str]) -> None:
        """No-op: nothing sleeps that verl could wake."""

    async def release(self) -> None:
        """See `resume`."""

    async def update_weights(self, weights: Any, **kwargs: Any) -> None:
        """Refuse: the weights are there."""
        raise RuntimeError("the trainer's ranks generate with the weights that they train; nothing may be sent to them")
