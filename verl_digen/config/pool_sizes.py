# SPDX-License-Identifier: Apache-2.0
"""Devices of each pool, and of one replica, as verl's config gives them."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl_digen.config import DigenConfig, RewardConfig
from verl_digen.config.reward import FUNCTIONS

ENVIRONMENT_KEY = "digen.environment"
"""Key of the environment workers."""

ROLLOUT = "actor_rollout_ref.rollout"
"""Prefix of the keys of the replicas' own pool."""

REPLICA_KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"
"""Key of the number of devices of a replica."""

ROUNDING = 1e-9
"""Shares that add up to a device may miss it by this much."""


def num_trainer_devices(config: Any) -> int:
    """Devices of the trainer's pool, each of which has one rank."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def num_data_parallel_ranks(config: Any) -> int:
    """Trainer ranks, or groups of ranks that share rows, that rows are dealt to."""
    return num_trainer_devices(config) // config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size


def num_shards(fsdp_size: int, num_ranks: int) -> int:
    """Ranks that share one copy of the weights."""
    return num_ranks if fsdp_size in (-1, 0) else min(fsdp_size, num_ranks)


def num_generator_devices(config: Any) -> int:
    """Devices of the replicas' own pool; 0 where `actor_rollout_ref.rollout.nnodes` is 0."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.nnodes * rollout.n_gpus_per_node


def has_reward_model(config: Any) -> bool:
    """True if verl starts servers of a reward model."""
    return config.reward.reward_model.enable


def num_function_devices(config: Any) -> int:
    """Devices of the processes that share the reward functions: verl's reward model pool, if no model is served."""
    return 0 if has_reward_model(config) else _num_model_pool_devices(config)


def num_reward_model_devices(config: Any) -> int:
    """Devices of the servers of verl's reward model."""
    return _num_model_pool_devices(config) if has_reward_model(config) else 0


def _num_model_pool_devices(config: Any) -> int:
    model = config.reward.reward_model
    return model.nnodes * model.n_gpus_per_node if model.enable_resource_pool else 0


def num_pool_devices(reward: RewardConfig) -> int:
    """Devices of rewards with processes of their own."""
    pools = [entry.pool for entry in reward.entries if entry.pool is not None]
    return _packed([pool.num_gpus for pool in pools for _ in range(pool.num_workers)])


def _packed(workers: Sequence[float]) -> int:
    """Devices of processes with these numbers of devices; those with shares are packed, the largest first."""
    free: list[float] = []
    for share in sorted((share for share in workers if 0 < share < 1), reverse=True):
        fitting = next((number for number, left in enumerate(free) if left >= share - ROUNDING), None)
        if fitting is None:
            free.append(1 - share)
        else:
            free[fitting] -= share
    return len(free) + sum(int(share) for share in workers if share >= 1)


def num_reward_devices(config: Any, reward: RewardConfig) -> int:
    """Devices of all reward processes."""
    return _num_model_pool_devices(config) + num_pool_devices(reward)


def asked_text(asked: Mapping[str, int]) -> str:
    """Pools with their keys and devices, for messages; see `asked_devices`."""
    return " + ".join(
        f"{pool} num_workers x num_gpus ({number})"
        if pool in (FUNCTIONS, ENVIRONMENT_KEY)
        else f"{pool}.nnodes x {pool}.n_gpus_per_node ({number})"
        for pool, number in asked.items()
    )


def asked_devices(config: Any, digen: DigenConfig, *, has_own_replicas: bool) -> dict[str, int]:
    """Pool, as the prefix of its keys, -> devices that it asks for; pools without devices are left out, and the
    replicas' where they share the trainer's (`has_own_replicas`)."""
    environment = digen.environment
    asked = {
        "trainer": num_trainer_devices(config),
        ROLLOUT: num_generator_devices(config) if has_own_replicas else 0,
        "reward.reward_model": _num_model_pool_devices(config),
        FUNCTIONS: num_pool_devices(digen.reward),
        ENVIRONMENT_KEY: _packed([environment.num_gpus] * environment.num_workers) if environment.is_on else 0,
    }
    return {pool: number for pool, number in asked.items() if number}


def num_replica_devices(config: Any) -> int:
    """Devices of one replica: tensor x data x pipeline parallel size."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
