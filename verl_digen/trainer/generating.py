# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.name=trainer`: the trainer's ranks generate with the weights that they train.

    agent loop workers --generate--> TrainerServer --draw--> all ranks     each denoises its share of the batch
                                                   <-------- references     samples go straight to who asked

There is no second copy of the network, no weights are sent, and nothing is moved between host and device. To verl it is
one replica of all ranks. Its server is a process without a device or a model, which collects requests into batches.

Invariant (tests/e2e/test_trainer_generates.py): samples are bitwise those of a `diffusers` replica, in fp32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray
from omegaconf import open_dict
from ray.exceptions import RayActorError
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import RolloutReplica

from verl_digen.agent_loop.chunks import describe
from verl_digen.config import RolloutConfig
from verl_digen.inputs import PromptInputs
from verl_digen.pool_sizes import num_trainer_devices
from verl_digen.rollout.batcher import Answers
from verl_digen.rollout.batching import BatchingServer
from verl_digen.rollout.registry import TRAINER
from verl_digen.rollout.replica import server_name
from verl_digen.trainer.relays import Together, Work, ranks_of
from verl_digen.types import SampleRequest


def span_all_ranks(config: Any) -> None:
    """Have verl make one replica of all ranks, if they generate."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == TRAINER:
        with open_dict(config):
            # ranks of a sequence-parallel group make the same samples
            rollout.tensor_model_parallel_size = (
                config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
            )
            rollout.data_parallel_size = num_trainer_devices(config) // rollout.tensor_model_parallel_size


class TrainerServer(BatchingServer):
    """See the module.

    Args:
        ranks: all ranks. num_ranks: of them, those that generate different samples.
        device: accelerator of the ranks; None on a CPU.
    """

    def __init__(self, ranks: Together, num_ranks: int, rollout: RolloutConfig, device: str | None):
        super().__init__(max_batch_size=rollout.batch_size * num_ranks, wait_s=rollout.batch_wait_s)
        self._ranks, self._num_ranks, self._device = ranks, num_ranks, device
        self._version: int | None = None
        self._announced: set[PromptInputs] = set()
        """Prompts that the ranks have heard of since the last weights."""
        self._prompt_cache = {"hits": 0, "misses": 0}
        self._batcher.pause()

    async def _generate_batch(self, requests: Sequence[SampleRequest], should_stop: Callable[[], bool]) -> Answers:
        own = {inputs for request in requests for inputs in request.branches}
        waiting = dict.fromkeys(inputs for request in self._batcher.waiting for inputs in request.branches)
        coming = tuple(inputs for inputs in waiting if inputs not in own | self._announced)
        self._announced |= own | {*coming}
        try:
            drawn = await self._ranks.call(Work("draw", (tuple(requests), coming, self._version)), "all")
        except RayActorError as error:  # no replica: the sample cannot go to another one
            raise RuntimeError(f"a rank of the trainer was lost while it generated: {describe(error)}") from error
        answers = {place: answer for of_rank, _ in drawn for place, answer in of_rank}
        facts = [fact for _, fact in drawn]
        self._prompt_cache = facts[0]["prompt_cache"]
        if (fitted := facts[0]["fitted"]) is not None:
            self._batcher.max_batch_size = fitted
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        told.set_result([answers[place] for place in range(len(requests))])
        return told

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

    async def wake_up(self) -> None:
        """No-op: `activate` does it."""

    async def check_health(self) -> dict[str, Any]:
        """State of this replica; see `verl_digen.trainer.replicas.Replicas.metrics`."""
        return {
            "version": self._version,
            "received_version": self._version,
            "prompt_cache": self._prompt_cache,
            "last_update": {},
            "device": self._device,
        }


class TrainerReplica(RolloutReplica):
    """verl's replica, of all ranks of the trainer."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *args: Any, **kwargs: Any):
        # verl's default, or a value for replicas, may not divide the number of ranks; nothing reads it here
        size = config.tensor_model_parallel_size * config.data_parallel_size
        super().__init__(replica_rank, config, model_config, gpus_per_node=size)

    async def init_hybrid(self, worker_group: Any) -> None:
        """verl's `init_hybrid`."""
        digen = omega_conf_to_dataclass(self.model_config).digen
        ranks = await asyncio.to_thread(ranks_of, worker_group, answer_s=digen.deadlines.answer_s)
        self._arguments = ranks, self.config.data_parallel_size, digen.rollout, worker_group.device_name()[0]
        await super().init_hybrid(worker_group)

    async def launch_servers(self) -> None:
        """Start the server, wherever there is room: it needs no device."""
        server: Any = (
            ray.remote(TrainerServer)
            .options(name=server_name(0), max_concurrency=self.max_concurrency, num_cpus=0)
            .remote(*self._arguments)
        )
        await server.ready.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, server_name(0)
