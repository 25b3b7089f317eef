# SPDX-License-Identifier: Apache-2.0
"""Time-step parallelism, `digen.tsp`; and devices, `digen.placement`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from verl_digen.require import In, OneOf, check_fields, number, require

REDUCE = ("auto", "tile", "fragment", "batch")


@dataclass(frozen=True)
class TspConfig:
    """Time-step parallelism: how rows are assigned to ranks and batched into tiles, and when gradients are reduced."""

    enable: bool = True
    """False: samples, not rows, are assigned to the ranks, and a tile holds one timestep of each of its samples."""
    samples_per_tile: Annotated[int | str, In("[1, inf]", "auto"), "memory decides; auto measures it"] = "auto"
    """Samples of one forward/backward on one rank. auto: as many as fit into memory with the given steps."""
    steps_per_tile: Annotated[int | str, In("[1, inf]", "auto"), "memory decides; auto measures it"] = "auto"
    """Timesteps of each sample in one forward/backward. auto: as many as fit into memory with the given samples.
    Memory grows with the product of the two; if both are auto, rows fill it in order, of any samples and timesteps."""
    reduce: Annotated[str, OneOf(REDUCE)] = "auto"
    """When gradients are summed over the ranks: at every tile, once per fragment, or once per logical batch. Later
    costs memory (each rank keeps the whole gradient unsharded) and saves communication. auto: batch with LoRA or
    where that memory is available, else tile."""

    def __post_init__(self) -> None:
        check_fields(self, "digen.tsp.")
        require(
            self.enable or self.steps_per_tile in ("auto", 1),
            "digen.tsp.steps_per_tile must be auto or 1 with digen.tsp.enable=false, where timesteps are not batched",
            self.steps_per_tile,
            "set digen.tsp.enable=true",
        )

    @property
    def extents(self) -> tuple[int | None, int | None]:
        """(samples, steps) of a tile; None where it is automatic."""
        return number(self.samples_per_tile), number(self.steps_per_tile) if self.enable else 1


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
    """Type of the nodes of all reward workers: the `reward.num_workers`, which divide the devices of
    `reward.reward_model.{nnodes,n_gpus_per_node}` if `reward.reward_model.enable_resource_pool` is true, and the
    `num_workers` of each reward of `digen.reward.functions`."""
