# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.name=trainer`: the trainer's ranks generate with the weights that they train.

    agent loop workers --generate--> TrainerServer --draw--> all ranks     each denoises its share of the batch
                                                   <-------- references     samples go straight to who asked

No weights are sent. To verl it is one replica of all ranks; its server is a process without a device or a model.

Invariant (tests/engine/test_generating.py): samples equal a `diffusers` replica's bitwise, in fp32.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray
from omegaconf import open_dict
from ray.exceptions import RayActorError, RayError
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import RolloutReplica

from verl_digen.config import RolloutConfig, digen_config
from verl_digen.config.pool_sizes import num_data_parallel_ranks, num_trainer_devices
from verl_digen.errors import RunStopped, describe
from verl_digen.inputs.images import PromptInputs
from verl_digen.processes.actors import MAX_CALLS
from verl_digen.processes.relays import Together, Work, ranks_of
from verl_digen.rollout.batcher import Answers, BatchingServer
from verl_digen.rollout.registry import TRAINER
from verl_digen.rollout.replica import server_name
from verl_digen.types import SampleRequest


def begin_generating(config: Any) -> None:
    """Have verl make one replica of all ranks, if they generate, and start its server."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == TRAINER:
        with open_dict(config):
            # ranks that share rows make the same samples
            rollout.data_parallel_size = num_data_parallel_ranks(config)
            rollout.tensor_model_parallel_size = num_trainer_devices(config) // rollout.data_parallel_size
        TrainerReplica.early_server = start_server(rollout.data_parallel_size, digen_config(config).rollout)


def start_server(num_ranks: int, rollout: RolloutConfig) -> Any:
    """Start the server of ranks that generate as many different samples, wherever there is room: it needs no device."""
    options = {"name": server_name(0), "max_concurrency": MAX_CALLS, "num_cpus": 0}
    batches = {"max_batch_size": rollout.batch_size * num_ranks, "wait_s": rollout.batch_wait_s}
    return ray.remote(TrainerServer).options(**options).remote(**batches)


class TrainerReplica(RolloutReplica):
    """verl's replica, of all ranks of the trainer."""

    early_server: Any = None
    """Handle of a server that was started before the ranks, for the first replica."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *args: Any, **kwargs: Any):
        # verl's default, or a value for replicas, may not divide the number of ranks; nothing reads it here
        size = config.tensor_model_parallel_size * config.data_parallel_size
        super().__init__(replica_rank, config, model_config, gpus_per_node=size)

    async def init_hybrid(self, worker_group: Any) -> None:
        """verl's `init_hybrid`."""
        self._worker_group = worker_group
        await super().init_hybrid(worker_group)

    async def launch_servers(self) -> None:
        """Connect the server with the ranks."""
        digen = omega_conf_to_dataclass(self.model_config).digen
        server = TrainerReplica.early_server or start_server(self.config.data_parallel_size, digen.rollout)
        TrainerReplica.early_server = None
        ranks = await asyncio.to_thread(ranks_of, self._worker_group, answer_s=digen.deadlines.answer_s)
        await server.connect.remote(ranks, self._worker_group.device_name()[0])
        self.servers = [server]
        self._server_handle, self._server_address = server, server_name(0)


class TrainerServer(BatchingServer):
    """Collects requests into batches of at most `max_batch_size` samples, on all ranks together. Starts before them:
    their handles need verl, whose import takes seconds."""

    def __init__(self, *, max_batch_size: int, wait_s: float):
        super().__init__(max_batch_size=max_batch_size, wait_s=wait_s)
        self._ranks, self._device = Together([]), None  # until `connect`
        self._version: int | None = None
        self._announced: set[PromptInputs] = set()
        """Prompts that the ranks have heard of since the last weights."""
        self._prompt_cache = {"hits": 0, "misses": 0}
        self._failure: RunStopped | None = None
        """Set once one of several ranks has failed: its next forward would meet one that the others still wait in."""
        self._batcher.pause()

    async def _generate_batch(self, requests: Sequence[SampleRequest], should_stop: Callable[[], bool]) -> Answers:
        own = {inputs for request in requests for inputs in request.branches}
        waiting = dict.fromkeys(inputs for request in self._batcher.waiting for inputs in request.branches)
        coming = tuple(inputs for inputs in waiting if inputs not in own | self._announced)
        self._announced |= own | {*coming}
        if self._failure is not None:
            raise self._failure
        try:
            drawn = await self._ranks.call(Work("draw", (tuple(requests), coming, self._version)), "all")
        except RayActorError as error:  # no replica: the sample cannot go to another one
            raise RuntimeError(f"a rank of the trainer was lost while it generated: {describe(error)}") from error
        except RayError as error:
            if self._ranks.num_processes == 1:
                raise
            self._failure = RunStopped(
                "the trainer's ranks must generate together, but one failed, for which the others may wait in a "
                f"collective ({describe(error)}); if memory ran out, lower digen.rollout.max_batch_size, or set "
                "actor_rollout_ref.rollout.name=diffusers"
            )
            raise self._failure from error
        answers = {place: answer for of_rank, _ in drawn for place, answer in of_rank}
        facts = [fact for _, fact in drawn]
        self._prompt_cache = facts[0]["prompt_cache"]
        if (fitted := facts[0]["fitted"]) is not None:
            self._batcher.max_batch_size = fitted
        outcomes: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        outcomes.set_result([answers[place] for place in range(len(requests))])
        return outcomes

    async def connect(self, ranks: Together, device: str | None) -> None:
        """Take all ranks, and their accelerator, None on a CPU."""
        self._ranks, self._device = ranks, device

    async def activate(self, version: int) -> None:
        """Generate with the ranks' weights from now on, as `version`. Idempotent."""
        async with self._batcher.exclusive():
            self._version = version
            self._announced.clear()
        self._batcher.resume()

    async def sleep(self) -> None:
        """Start no batch until `activate`, and end the running one; the ranks free what only generation needs."""
        self._batcher.pause()
        async with self._batcher.exclusive():
            await self._ranks.call(Work("rest"), "first")

    async def check_health(self) -> dict[str, Any]:
        """State of this replica; see `verl_digen.trainer.replicas.Replicas.metrics`."""
        return {
            "version": self._version,
            "received_version": self._version,
            "prompt_cache": self._prompt_cache,
            "last_update": {},
            "device": self._device,
        }
