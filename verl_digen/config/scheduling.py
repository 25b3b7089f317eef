# SPDX-License-Identifier: Apache-2.0
"""Scheduling: `digen.gap`, `queue`, `tag`, `staleness`, `tsp`; and devices, `digen.placement`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, get_args

from verl_digen.require import In, OneOf, check_fields, require
from verl_digen.schedulers.rules import AssistPolicy

REDUCE = ("auto", "tile", "fragment", "batch")


@dataclass(frozen=True)
class GapConfig:
    """Generation-axis pipeline on separate pools (`recipe=...+disaggregated`)."""

    enable: bool = True
    """A fragment trains as soon as it is ready. False: the batch trains in one call, when it is complete (barrier)."""
    chunk_size: Annotated[int | str, In("[1, inf]", "auto"), "auto suits most runs"] = "auto"
    """Samples of one group that a slot generates together. auto: a group is spread over all replicas, within what
    `digen.rollout.max_batch_size` lets a replica denoise at once. 1: every sample is sent on its own."""
    slots_per_replica: Annotated[int | str, In("[1, inf]", "auto"), "auto suits most runs"] = "auto"
    """Chunks in flight per replica: one that it generates, and others that wait, so that it is busy while samples are
    sent and the next chunk is requested. auto: 2; with `digen.tag.policy` 1, because the trainer cannot generate a
    chunk that waits; with `digen.environment` 1, where it is the number of episodes."""
    join_groups: bool = False
    """Chunks of several groups that wait on a replica share a batch, up to `digen.rollout.max_batch_size`. Pays where a
    batch of few samples takes nearly as long as a full one, which small pictures do; else the first group comes later.
    Give as many slots as chunks fit into two batches."""
    min_groups_per_fragment: Annotated[int | str, In("[1, inf]", "auto"), "auto suits most runs"] = "auto"
    """A smaller fragment trains only when no further group is expected. auto: what is ready trains, unless a group
    that is expected soon joins it and the batch then ends earlier, by the measured fixed part of a training call and
    the predicted times, and no assist may fill the time. 1: what is ready trains at once."""
    max_groups_per_fragment: Annotated[int | str, In("[1, inf]", "auto"), "auto suits most runs"] = "auto"
    """Groups that completed while the trainer was busy merge into one fragment up to this. auto: 8, or where
    these have fewer than 3 rows per rank as many as have a sample for every rank, at most a quarter of the batch;
    chosen by simulation, see `verl_digen.schedulers.rules`."""

    def __post_init__(self) -> None:
        check_fields(self, "digen.gap.")
        require(
            self.most_groups is None or self.most_groups >= self.least_groups,
            "digen.gap.max_groups_per_fragment must be auto or a number of groups >= "
            f"min_groups_per_fragment={self.min_groups_per_fragment}",
            self.max_groups_per_fragment,
            "auto suits most runs",
        )

    @property
    def least_groups(self) -> int:
        """Smallest fragment while more groups are expected; 1 with auto."""
        return 1 if isinstance(self.min_groups_per_fragment, str) else self.min_groups_per_fragment

    @property
    def most_groups(self) -> int | None:
        """Largest fragment; None with auto."""
        return None if isinstance(self.max_groups_per_fragment, str) else self.max_groups_per_fragment


@dataclass(frozen=True)
class QueueConfig:
    """Queue of samples for generation on separate pools (ROLL Flash's queue)."""

    replicate_prompts: bool = True
    """Samples of a group are sent independently. False: a whole group per slot."""
    extra_prompts: Annotated[int, In("[0, inf]"), "0: none"] = 0
    """Groups begun in addition to the batch's; once enough are complete, the surplus is dropped."""
    drop_zero_spread: bool = False
    """A group whose rewards are all equal carries no gradient: it is dropped and replaced, within
    `digen.max_refills_per_step`."""
    max_sample_refills: Annotated[int | None, In("[0, inf]"), "null means as many as a group has"] = None
    """Maximum retries of failed samples per step; beyond it their groups are dropped. 0: none. null: the group size."""

    def __post_init__(self) -> None:
        check_fields(self, "digen.queue.")

    def most_sample_refills(self, group_size: int) -> int:
        """`max_sample_refills`, or the group size where it is null."""
        return group_size if self.max_sample_refills is None else self.max_sample_refills


@dataclass(frozen=True)
class TagConfig:
    """Trainer-assisted generation on separate pools: a trainer without a ready fragment generates samples itself."""

    policy: Annotated[str, OneOf(get_args(AssistPolicy))] = "off"
    """off | bts: when a search on the measured durations says that it shortens the batch | always: at every bubble,
    which is known to lose time."""
    chunk_size: Annotated[int | str, In("[1, inf]", "auto"), "auto suits most runs"] = "auto"
    """Samples that the trainer's ranks generate together, of as many groups as they belong to; of one group where the
    samples of a group share or pass over steps before their window. auto: one per rank, or an equal larger number where
    a slot's chunk has more samples than the trainer has ranks, or where the search finds that more at a time end the
    batch sooner; at most `digen.rollout.max_batch_size` per rank."""

    def __post_init__(self) -> None:
        check_fields(self, "digen.tag.")


@dataclass(frozen=True)
class StalenessConfig:
    """Limits on how far generation may run ahead of training on separate pools. Every group records its one version."""

    max_versions: Annotated[int, In("[0, inf]"), "0 is on-policy"] = 0
    """Versions that a group may be behind the weights it trains. 0: strictly on-policy. 1: TCSS; a replica without a
    chunk left begins the next batch under the weights it has, where the trainer assists with groups that end before it
    would have generated them. More: bounded asynchrony, with an off-policy loss."""
    fraction: Annotated[float, In("(0, 1]"), "digen.staleness.max_versions=0 turns staleness off"] = 1.0
    """Share of a batch that may be `max_versions` behind; the whole batch may be less behind. ROLL Flash's
    async_generation_ratio is max_versions - 1 + fraction."""

    def __post_init__(self) -> None:
        check_fields(self, "digen.staleness.")


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
        samples = None if isinstance(self.samples_per_tile, str) else self.samples_per_tile
        if not self.enable:
            return samples, 1
        return samples, None if isinstance(self.steps_per_tile, str) else self.steps_per_tile


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
