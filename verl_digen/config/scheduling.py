# SPDX-License-Identifier: Apache-2.0
"""Time-step parallelism, `digen.tsp`; and devices, `digen.placement`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from verl_digen.require import In, OneOf, check_fields, number, require

REDUCE = ("auto", "tile", "fragment", "batch")


@dataclass(frozen=True)
class TspConfig:
    """Time-step parallelism: assignment of rows to ranks and tiles, and reduction of gradients."""

    enable: bool = True
    """False: ranks get samples instead of rows, and a tile has one timestep of each of its samples."""
    samples_per_tile: Annotated[int | str, In("[1, inf]", "auto"), "memory decides; auto measures it"] = "auto"
    """Samples of one forward and backward on a rank. auto: as many as fit into memory."""
    steps_per_tile: Annotated[int | str, In("[1, inf]", "auto"), "memory decides; auto measures it"] = "auto"
    """Timesteps of each sample in one forward and backward. auto: as many as fit into memory. If both are auto, a tile
    takes rows in order, of any samples and timesteps."""
    reduce: Annotated[str, OneOf(REDUCE)] = "auto"
    """When gradients are summed over the ranks: per tile, fragment or (logical) batch. Later saves communication but
    costs memory: each rank keeps the unsharded gradient. auto: batch with LoRA or if memory allows, else tile."""

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
    """Device types of the pools in a mixed cluster: Ray's names, such as H100, or custom resources (`ray start
    --resources='{"NAME": 1}'`). null: any device. Name a type for each pool, or for none."""

    trainer_accelerator: str | None = None
    """Type of the `trainer.nnodes` x `trainer.n_gpus_per_node` devices."""
    generator_accelerator: str | None = None
    """Type of the `actor_rollout_ref.rollout.nnodes` x `n_gpus_per_node` devices (`recipe=...+disaggregated`)."""
    reward_accelerator: str | None = None
    """Type of the nodes of all reward workers: verl's `reward.num_workers`, and `num_workers` of each reward in
    `digen.reward.functions`."""
