# SPDX-License-Identifier: Apache-2.0
"""Scheduling: `digen.gap`, `queue`, `tag`, `staleness`, `tsp`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from verl_digen.require import require, require_one_of
from verl_digen.schedulers.rules import AssistPolicy

REDUCE = ("auto", "tile", "fragment", "batch")


@dataclass(frozen=True)
class GapConfig:
    """Generation-axis pipeline on separate pools (`recipe=...+disaggregated`)."""

    enable: bool = True
    """A fragment trains as soon as it is ready. False: the batch trains in one call, when it is complete (barrier)."""
    chunk_size: int | str = "auto"
    """Samples of one group that a slot generates together. auto: a group is spread over all replicas, within what
    `digen.rollout.max_batch_size` lets a replica denoise at once. 1: every sample is sent on its own."""
    slots_per_replica: int | str = "auto"
    """Chunks in flight per replica: one that it generates, and others that wait, so that it is busy while samples are
    sent and the next chunk is requested. auto: 2; with `digen.tag.policy` 1, because the trainer cannot generate a
    chunk that waits; with `digen.environment` 1, where it is the number of episodes."""
    join_groups: bool = False
    """Chunks of several groups that wait on a replica share a batch, up to `digen.rollout.max_batch_size`. Pays where a
    batch of few samples takes nearly as long as a full one, which small pictures do; else the first group comes later.
    Give as many slots as chunks fit into two batches."""
    min_groups_per_fragment: int | str = "auto"
    """A smaller fragment trains only when no further group is expected. auto: what is ready trains, unless a group
    that is expected soon joins it and the batch then ends earlier, by the measured fixed part of a training call and
    the predicted times, and no assist may fill the time. 1: what is ready trains at once."""
    max_groups_per_fragment: int | str = "auto"
    """Groups that completed while the trainer was busy merge into one fragment up to this. auto: 8, or where
    these have fewer than 3 rows per rank as many as have a sample for every rank, at most a quarter of the batch;
    chosen by simulation, see `verl_digen.schedulers.rules`."""

    def __post_init__(self) -> None:
        require(
            self.chunk_size == "auto" or (isinstance(self.chunk_size, int) and self.chunk_size >= 1),
            "digen.gap.chunk_size must be auto or a number of samples >= 1",
            self.chunk_size,
            "auto suits most runs",
        )
        require(
            self.slots_per_replica == "auto"
            or (isinstance(self.slots_per_replica, int) and self.slots_per_replica >= 1),
            "digen.gap.slots_per_replica must be auto or a number of chunks >= 1",
            self.slots_per_replica,
            "auto suits most runs",
        )
        least = self.min_groups_per_fragment
        require(
            least == "auto" or (isinstance(least, int) and least >= 1),
            "digen.gap.min_groups_per_fragment must be auto or a number of groups >= 1",
            least,
            "auto suits most runs",
        )
        most = self.max_groups_per_fragment
        require(
            most == "auto" or (isinstance(most, int) and most >= self.least_groups),
            f"digen.gap.max_groups_per_fragment must be auto or a number of groups >= min_groups_per_fragment={least}",
            most,
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
    extra_prompts: int = 0
    """Groups begun in addition to the batch's; once enough are complete, the surplus is dropped."""
    drop_zero_spread: bool = False
    """A group whose rewards are all equal carries no gradient: it is dropped and replaced, within
    `digen.max_refills_per_step`."""
    max_sample_refills: int | None = None
    """Maximum retries of failed samples per step; beyond it their groups are dropped. 0: none. null: the group size."""

    def __post_init__(self) -> None:
        require(self.extra_prompts >= 0, "digen.queue.extra_prompts must be >= 0", self.extra_prompts, "0: none")
        require(
            self.max_sample_refills is None or self.max_sample_refills >= 0,
            "digen.queue.max_sample_refills must be null or >= 0",
            self.max_sample_refills,
            "null means as many as a group has",
        )

    def most_sample_refills(self, group_size: int) -> int:
        """`max_sample_refills`, or the group size where it is null."""
        return group_size if self.max_sample_refills is None else self.max_sample_refills


@dataclass(frozen=True)
class TagConfig:
    """Trainer-assisted generation on separate pools: a trainer without a ready fragment generates samples itself."""

    policy: str = "off"
    """off | bts: when a search on the measured durations says that it shortens the batch | always: at every bubble,
    which is known to lose time."""
    chunk_size: int | str = "auto"
    """Samples that the trainer's ranks generate together, of as many groups as they belong to; of one group where the
    samples of a group share or pass over steps before their window. auto: one per rank, or an equal larger number where
    a slot's chunk has more samples than the trainer has ranks, or where the search finds that more at a time end the
    batch sooner; at most `digen.rollout.max_batch_size` per rank."""

    def __post_init__(self) -> None:
        require_one_of("digen.tag.policy", self.policy, get_args(AssistPolicy))
        require(
            self.chunk_size == "auto" or (isinstance(self.chunk_size, int) and self.chunk_size >= 1),
            "digen.tag.chunk_size must be auto or a number of samples >= 1",
            self.chunk_size,
            "auto suits most runs",
        )


@dataclass(frozen=True)
class StalenessConfig:
    """Limits on how far generation may run ahead of training on separate pools. Every group records its one version."""

    max_versions: int = 0
    """Versions that a group may be behind the weights it trains. 0: strictly on-policy. 1: TCSS; a replica without a
    chunk left begins the next batch under the weights it has, where the trainer assists with groups that end before it
    would have generated them. More: bounded asynchrony, with an off-policy loss."""
    fraction: float = 1.0
    """Share of a batch that may be `max_versions` behind; the whole batch may be less behind. ROLL Flash's
    async_generation_ratio is max_versions - 1 + fraction."""

    def __post_init__(self) -> None:
        require(
            self.max_versions >= 0, "digen.staleness.max_versions must be >= 0", self.max_versions, "0 is on-policy"
        )
        require(
            0 < self.fraction <= 1,
            "digen.staleness.fraction must lie in (0, 1]",
            self.fraction,
            "digen.staleness.max_versions=0 turns staleness off",
        )


@dataclass(frozen=True)
class TspConfig:
    """Time-step parallelism: how rows are assigned to ranks and batched into tiles, and when gradients are reduced."""

    enable: bool = True
    """False: samples, not rows, are assigned to the ranks, and a tile holds one timestep of each of its samples."""
    samples_per_tile: int | str = "auto"
    """Samples of one forward/backward on one rank. auto: as many as fit into memory with the given steps."""
    steps_per_tile: int | str = "auto"
    """Timesteps of each sample in one forward/backward. auto: as many as fit into memory with the given samples.
    Memory grows with the product of the two; if both are auto, rows fill it in order, of any samples and timesteps."""
    reduce: str = "auto"
    """When gradients are summed over the ranks: at every tile, once per fragment, or once per logical batch. Later
    costs memory (each rank keeps the whole gradient unsharded) and saves communication. auto: batch with LoRA or
    where that memory is available, else tile."""

    def __post_init__(self) -> None:
        require_one_of("digen.tsp.reduce", self.reduce, REDUCE)
        for name in ("samples_per_tile", "steps_per_tile"):
            value = getattr(self, name)
            require(
                value == "auto" or (isinstance(value, int) and value >= 1),
                f"digen.tsp.{name} must be auto or a number >= 1",
                value,
                "memory decides; auto measures it",
            )
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
