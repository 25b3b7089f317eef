# SPDX-License-Identifier: Apache-2.0
"""Devices of each pool, and of one replica, as verl's config gives them."""

from __future__ import annotations

from typing import Any


def num_trainer_devices(config: Any) -> int:
    """Devices of the trainer's pool, each of which has one rank."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def num_generator_devices(config: Any) -> int:
    """Devices of the replicas' own pool; 0 where `actor_rollout_ref.rollout.nnodes` is 0."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.nnodes * rollout.n_gpus_per_node


def num_reward_devices(config: Any) -> int:
    """Devices of the reward workers: verl's reward model pool, if that is a separate pool."""
    model = config.reward.reward_model
    return model.nnodes * model.n_gpus_per_node if model.enable_resource_pool else 0


def num_replica_devices(config: Any) -> int:
    """Devices of one replica: tensor x data x pipeline parallel size."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
