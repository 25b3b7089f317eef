# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.name=trainer`: the trainer's ranks generate with the weights that they train.

    agent loop workers --generate--> TrainerServer --draw--> all ranks     each denoises its share of the batch
                                                   <-------- references     samples go straight to who asked

No weights are sent. To verl it is one replica of all ranks; its server is a process without a device or a model.

Invariant (tests/engine/test_generating.py): samples equal a `diffusers` replica's bitwise, in fp32.
"""

import asyncio
from typing import Any

import ray
from omegaconf import open_dict
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import RolloutReplica

from verl_digen.config import RolloutConfig, digen_config
from verl_digen.config.pool_sizes import num_data_parallel_ranks, num_trainer_devices
from verl_digen.processes.relays import ranks_of
from verl_digen.rollout.registry import TRAINER
from verl_digen.rollout.replica import server_name
from verl_digen.trainer.rank_server import TrainerServer

MAX_CALLS = 10_000
"""Calls of the server at a time: the samples of a step, each of which waits in one."""


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
