# SPDX-License-Identifier: Apache-2.0
"""Planning rules: the switches of the techniques, filled from the config, which checks their bounds.

Every field names its config key; meaning and bound are there (`verl_digen.config.scheduling`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AssistPolicy = Literal["off", "bts", "always"]
"""Policy of assists. off: the trainer never generates. bts: at bubbles where a search says that it shortens the batch.
always: at every bubble."""

GROUPS_PER_FRAGMENT = 8
"""Most groups of a fragment where they have enough rows for all ranks. In the simulated runs of the four shipped
profiles on 16 and 32 devices, 8 is within 1 % of no limit, and 4 up to 3 % slower; more groups mean more rows in
memory at a time."""

ROWS_PER_RANK = 3
"""Rows per rank below which `GROUPS_PER_FRAGMENT` groups are too few: all ranks wait for those with a row more.
Simulated, larger fragments are not always faster above it (docs/control_plane.md)."""

FRAGMENTS_PER_BATCH = 4
"""Fragments into which at least a batch is cut: while one trains, the groups of the next are generated."""


def groups_per_fragment(num_ranks: int, group_size: int, num_prompts: int, rows_per_group: int) -> int:
    """Most groups of a fragment, `digen.gap.max_groups_per_fragment=auto`.

    `GROUPS_PER_FRAGMENT`; where these have fewer than `ROWS_PER_RANK` rows per rank, as many as have at most one sample
    per rank, and at most a share of the batch: max(8, min(floor(ranks / G), floor(P / FRAGMENTS_PER_BATCH))). One group
    more than that would give a few ranks the rows of a second sample.

    Args:
        rows_per_group: trained rows of the samples of a group.

    Example, groups of 12 samples with 9 trained steps:
        groups_per_fragment(24, 12, 32, 108)     # 8: 36 rows per rank
        groups_per_fragment(704, 12, 352, 108)   # 58: 9 rows per rank; of 8 groups, some ranks have 2 and some have 1
    """
    if GROUPS_PER_FRAGMENT * rows_per_group >= ROWS_PER_RANK * num_ranks:
        return GROUPS_PER_FRAGMENT
    return max(GROUPS_PER_FRAGMENT, min(num_ranks // group_size, num_prompts // FRAGMENTS_PER_BATCH))


@dataclass(frozen=True)
class BatchRules:
    """Config values that the planner needs.

    Example:
        BatchRules(num_prompts=8, group_size=16)   # strict, pipelined, no assists
    """

    num_prompts: int
    """P, `data.train_batch_size`."""
    group_size: int
    """G, `actor_rollout_ref.rollout.n`."""
    rows_per_group: int | None = None
    """Trained rows of the samples of a group; None: one of each."""
    is_pipelined: bool = True
    """`digen.gap.enable`: a fragment trains as soon as it is ready. False: the batch trains in one call (barrier)."""
    chunk_size: int | None = None
    """`digen.gap.chunk_size`: samples of a chunk; None = auto, see `slot_chunk_size`."""
    max_chunk_size: int = 8
    """`digen.rollout.max_batch_size`: samples a slot denoises at once; upper limit of `auto`."""
    slots_per_replica: int = 1
    """Slots of a replica, of which one is at work and the others wait for it."""
    replicate_prompts: bool = True
    """`digen.queue.replicate_prompts`: a group's samples go out independently. False: a whole group per slot."""
    min_groups_per_fragment: int = 1
    """`digen.gap.min_groups_per_fragment`: a smaller fragment trains only when no more groups are to come."""
    merges: bool = False
    """`digen.gap.min_groups_per_fragment=auto`: the trainer waits for a larger fragment where the batch then ends
    earlier, see `verl_digen.schedulers.merging`."""
    max_groups_per_fragment: int | None = None
    """`digen.gap.max_groups_per_fragment`: groups that completed while the trainer was busy merge up to this; None =
    auto, see `largest_fragment`."""
    assist: AssistPolicy = "off"
    """`digen.tag.policy`."""
    num_trainer_ranks: int = 1
    """Ranks of the trainer, which share the samples of an assist."""
    assist_chunk_size: int | None = None
    """`digen.tag.chunk_size`: samples of an assist; None = auto, see `assist_sizes`."""
    assist_spans_groups: bool = True
    """False: all samples of an assist are of one group, see `verl_digen.trainer.batch_rules`."""
    max_versions: int = 0
    """`digen.staleness.max_versions`: 0 strict, 1 TCSS, n needs an off-policy loss."""
    fraction: float = 1.0
    """`digen.staleness.fraction`: share of a batch that may be `max_versions` stale; all of it may be less stale."""
    extra_prompts: int = 0
    """`digen.queue.extra_prompts`: groups begun beyond P; the surplus is cancelled once P are complete."""
    drop_zero_spread: bool = False
    """`digen.queue.drop_zero_spread`: a group whose rewards are all equal is dropped; `max_group_refills`
    bounds the replacements."""
    max_group_refills: int = 0
    """`digen.max_refills_per_step`: maximum number of prompts drawn in one batch to replace dropped groups."""
    max_sample_refills: int = 0
    """`digen.queue.max_sample_refills`: maximum number of failed samples regenerated in one batch."""

    @property
    def techniques(self) -> tuple[str, ...]:
        """Techniques of `schedulers.simulation.TECHNIQUES` that are on; tiles, which the planner does not make, too."""
        on = {"gap": self.is_pipelined, "tsp": True, "tag": self.assist != "off", "tcss": self.max_versions > 0}
        return tuple(name for name, is_on in on.items() if is_on)

    @property
    def largest_fragment(self) -> int:
        """Most groups of a fragment in a pipelined run: as configured, else `groups_per_fragment`."""
        if self.max_groups_per_fragment is not None:
            return self.max_groups_per_fragment
        rows = self.group_size if self.rows_per_group is None else self.rows_per_group
        found = groups_per_fragment(self.num_trainer_ranks, self.group_size, self.num_prompts, rows)
        return max(found, self.min_groups_per_fragment)

    def slot_chunk_size(self, num_slots: int) -> int:
        """Samples of a slot's chunk: as configured, else ceil(G / replicas), at most `max_chunk_size`.

        A group is then spread over all replicas, and further slots of a replica hold the next groups; with more
        replicas than samples, a chunk is one sample and the remaining replicas work on the next groups.

        Example:
            BatchRules(8, 16).slot_chunk_size(num_slots=8)                         # 2
            BatchRules(8, 16, slots_per_replica=2).slot_chunk_size(num_slots=16)   # 2: of two groups on a replica
        """
        if not self.replicate_prompts:
            return self.group_size
        if self.chunk_size is not None:
            return min(self.chunk_size, self.group_size)
        num_replicas = max(1, -(-num_slots // self.slots_per_replica))
        return min(self.max_chunk_size, -(-self.group_size // num_replicas))

    def assist_sizes(self, num_slots: int) -> tuple[int, ...]:
        """Numbers of samples that an assist may have, ascending; the last assist of a batch may have fewer.

        As configured, else equal numbers on all ranks: auto = ranks * max(1, slot_chunk_size // ranks), the least that
        leaves no rank idle, and this doubled as often as a rank's samples are at most `max_chunk_size`, and the assist
        at most the batch. At most G where an assist keeps to one group.

        Example:
            BatchRules(8, 12, num_trainer_ranks=24).assist_sizes(num_slots=8)   # (24, 48, 96): one sample per rank ...
            BatchRules(8, 16, num_trainer_ranks=4).assist_sizes(num_slots=8)    # (4, 8, 16, 32)
            BatchRules(8, 12, num_trainer_ranks=1).assist_sizes(num_slots=2)    # (6,): same as a slot's chunk
        """
        largest = self.num_prompts * self.group_size if self.assist_spans_groups else self.group_size
        if self.assist_chunk_size is not None:
            return (min(self.assist_chunk_size, largest),)
        ranks = self.num_trainer_ranks
        sizes = [ranks * max(1, self.slot_chunk_size(num_slots) // ranks)]
        while 2 * sizes[-1] <= min(ranks * self.max_chunk_size, largest):
            sizes.append(2 * sizes[-1])
        return tuple(min(size, largest) for size in sizes)

    def assist_rounds(self, num_samples: int) -> int:
        """Samples of the fullest rank in an assist of `num_samples`."""
        return -(-num_samples // self.num_trainer_ranks)

    def stale_allowance(self, age_versions: int) -> int:
        """Maximum number of groups of one batch begun `age_versions` or more behind the version the batch trains on.

        One rule for all modes, with the asynchrony a = max_versions - 1 + fraction (0 if max_versions is 0): groups of
        (1 + a) batches in total may be begun under one version. So allowance(d) = floor(P * clamp(a + 1 - d, 0, 1)).
        a is ROLL Flash's async_generation_ratio.
        """
        asynchrony = self.max_versions - 1 + self.fraction if self.max_versions else 0.0
        share = min(1.0, max(0.0, asynchrony + 1 - age_versions))
        return int(self.num_prompts * share + 1e-9)  # 0.3 * 10 must be 3
