# SPDX-License-Identifier: Apache-2.0
"""Devices: `digen.placement`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlacementConfig:
    """Types of the pools' devices, in a cluster that has several: Ray's names, such as H100, or custom resources
    (`ray start --resources='{"NAME": 1}'`). null: any device, also one that another pool would need; name a type for
    each pool, or for none."""

    trainer_accelerator: str | None = None
    """Type of the `trainer.nnodes` x `trainer.n_gpus_per_node` devices."""
    generator_accelerator: str | None = None
    """Type of the `actor_rollout_ref.rollout.nnodes` x `n_gpus_per_node` devices (`recipe=...+disaggregated`)."""
    reward_accelerator: str | None = None
    """Type of the nodes of all reward workers: the `reward.num_workers` that hold functions, which divide the devices
    of `reward.reward_model.{nnodes,n_gpus_per_node}` where `reward.reward_model.enable_resource_pool` is true, and the
    `num_workers` of each reward of `digen.reward.functions`."""
