# SPDX-License-Identifier: Apache-2.0
"""Devices: `digen.placement`, `digen.virtual`."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_digen.require import require


@dataclass(frozen=True)
class PlacementConfig:
    """Types of the pools' devices, in a cluster that has several: Ray's names, such as H100, or custom resources
    (`ray start --resources='{"NAME": 1}'`). null: any device, also one that another pool would need; name a type for
    each pool, or for none."""

    trainer_accelerator: str | None = None
    """Type of the `trainer.nnodes` x `trainer.n_gpus_per_node` devices."""
    generator_accelerator: str | None = None
    """Type of the `actor_rollout_ref.rollout.nnodes` x `n_gpus_per_node` devices (`recipe=[...,disaggregated]`)."""
    reward_accelerator: str | None = None
    """Type of the nodes of all reward workers: the `reward.num_workers` that hold functions, which divide the devices
    of `reward.reward_model.{nnodes,n_gpus_per_node}` where `reward.reward_model.enable_resource_pool` is true, and the
    `num_workers` of each reward of `digen.reward.functions`."""


@dataclass(frozen=True)
class VirtualConfig:
    """Virtual devices, which only take time (`recipe=[...,disaggregated,virtual]`): all else in a run is real."""

    profile: str | None = None
    """Source of durations: a shipped profile or a file, see `digen simulate`. null: devices are real."""
    time_scale: float = 1.0
    """Factor on every duration of the profile."""
    trainer_ranks: int = 1
    """Devices of the trainer, all in one process. The generator's are `actor_rollout_ref.rollout.n_gpus_per_node`."""
    trainer_device: str | None = None
    """Type of the trainer's devices, one of `digen simulate`'s: H800, H20, ... null: the profile's own."""
    generator_device: str | None = None
    """Type of the generator's devices, likewise."""
    latent_shape: list[int] = field(default_factory=lambda: [16, 8, 8])
    """Shape of one recorded latent, in `digen.rollout.latents_dtype`.
    Wan2.1, 480 x 832 px, 81 frames: [16, 21, 60, 104]."""
    fetch_rows: bool = True
    """The trainer fetches from TransferQueue what its ranks would train on, and discards it."""

    def __post_init__(self) -> None:
        require(self.time_scale > 0, "digen.virtual.time_scale must be > 0", self.time_scale, "1 is the profile's time")
        require(
            self.trainer_ranks >= 1, "digen.virtual.trainer_ranks must be >= 1", self.trainer_ranks, "give a number"
        )
        require(
            len(self.latent_shape) > 0 and all(size >= 1 for size in self.latent_shape),
            "digen.virtual.latent_shape must be a list of sizes >= 1",
            self.latent_shape,
            "give the shape of one latent, e.g. [16, 8, 8]",
        )
