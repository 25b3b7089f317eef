# SPDX-License-Identifier: Apache-2.0
"""Planning rules: `digen.gap`, `queue`, `tag` and `staleness`, and what else of a run the planner needs."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from verl_digen.require import In, OneOf, Section, number

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


@dataclass(frozen=True)
class GapConfig(Section, key="digen.gap"):
    """Generation-axis pipeline on separate pools (`recipe=...+disaggregated`)."""

    enable: bool = True
    """A fragment trains as soon as it is ready. False: the batch trains in one call when it is complete."""
    chunk_size: Annotated[int | str, In("[1, inf]", "auto"), "auto suits most runs"] = "auto"
    """Samples of one group that a replica generates together. auto: a group is spread over all replicas, with at most
    `digen.rollout.max_batch_size` samples each."""
    slots_per_replica: Annotated[int | str, In("[1, inf]", "auto"), "auto suits most runs"] = "auto"
    """Chunks in flight per replica: one is generated while the others wait there. With `digen.environment`: episodes.
    auto: 2; 1 with `digen.tag.policy`, because the trainer cannot take a waiting chunk, and with environments."""
    max_groups_per_fragment: Annotated[int | str, In("[1, inf]", "auto"), "auto suits most runs"] = "auto"
    """Maximum groups that merge into one fragment while the trainer is busy. auto: 8, or if these have fewer than 3
    rows per rank, one sample per rank, at most a quarter of the batch."""


@dataclass(frozen=True)
class QueueConfig(Section, key="digen.queue"):
    """ROLL Flash's queue of samples on separate pools."""

    replicate_prompts: bool = True
    """Send the samples of a group independently. False: a whole group per slot."""
    extra_prompts: Annotated[int, In("[0, 10000]"), "0: none"] = 0
    """Additional groups per batch; the surplus is dropped once enough are complete."""
    drop_zero_spread: bool = False
    """Replace groups whose rewards are all equal, which have no gradient, within `digen.max_refills_per_step`."""
    max_sample_refills: Annotated[int | None, In("[0, inf]"), "null means as many as a group has"] = None
    """Maximum retries of failed samples per step; beyond it their groups are dropped. 0: none. null: the group size."""


@dataclass(frozen=True)
class TagConfig(Section, key="digen.tag"):
    """Trainer-assisted generation on separate pools: a trainer without a ready fragment generates samples itself."""

    policy: Annotated[str, OneOf(get_args(AssistPolicy))] = "off"
    """off | bts: when a search on measured durations says that the batch ends sooner | always: at every bubble, which
    loses time."""
    chunk_size: Annotated[int | str, In("[1, inf]", "auto"), "auto suits most runs"] = "auto"
    """Samples that the trainer's ranks generate together; of one group if its samples share or skip steps before their
    window. auto: one per rank, or more if a replica's chunk is larger than the number of ranks or if the search finds
    it faster; at most `digen.rollout.max_batch_size` per rank."""


@dataclass(frozen=True)
class StalenessConfig(Section, key="digen.staleness"):
    """Limits on how far generation may run ahead of training on separate pools. Every group has one version."""

    max_versions: Annotated[int, In("[0, inf]"), "0 is on-policy"] = 0
    """Versions that a group may be behind the weights it trains. 0: strictly on-policy. 1: TCSS; an idle replica begins
    the next batch with its current weights. More: bounded asynchrony, with an off-policy loss."""
    fraction: Annotated[float, In("(0, 1]"), "digen.staleness.max_versions=0 turns staleness off"] = 1.0
    """Share of a batch that may be `max_versions` behind; the rest may be one version less behind. ROLL Flash's
    async_generation_ratio is max_versions - 1 + fraction."""


@dataclass(frozen=True)
class BatchRules:
    """The config's own sections, and values that the planner needs beside them.

    Example:
        BatchRules(num_prompts=8, group_size=16)   # strict, pipelined, no assists
    """

    num_prompts: int
    """P, `data.train_batch_size`."""
    group_size: int
    """G, `actor_rollout_ref.rollout.n`."""
    gap: GapConfig = field(default_factory=GapConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    tag: TagConfig = field(default_factory=TagConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    rows_per_group: int | None = None
    """Trained rows of the samples of a group; None: one of each."""
    max_chunk_size: int = 8
    """`digen.rollout.max_batch_size`: samples a slot denoises at once; upper limit of `auto`."""
    slots_per_replica: int = 1
    """Slots of a replica, of which one is at work and the others wait for it: `digen.gap.slots_per_replica`, or what
    auto stands for."""
    num_trainer_ranks: int = 1
    """Ranks of the trainer, which share the samples of an assist."""
    assist_spans_groups: bool = True
    """False: all samples of an assist are of one group, see `verl_digen.sampling.requests`."""
    max_group_refills: int = 0
    """`digen.max_refills_per_step`: maximum number of prompts drawn in one batch to replace dropped groups."""

    @property
    def max_sample_refills(self) -> int:
        """Maximum number of failed samples regenerated in one batch."""
        return self.group_size if self.queue.max_sample_refills is None else self.queue.max_sample_refills

    @property
    def techniques(self) -> tuple[str, ...]:
        """Techniques of `schedulers.simulation.TECHNIQUES` that are on; tiles, which the planner does not make, too."""
        is_stale = self.staleness.max_versions > 0
        on = {"gap": self.gap.enable, "tsp": True, "tag": self.tag.policy != "off", "tcss": is_stale}
        return tuple(name for name, is_on in on.items() if is_on)

    @property
    def largest_fragment(self) -> int:
        """Most groups of a fragment in a pipelined run, `digen.gap.max_groups_per_fragment`.

        auto: `GROUPS_PER_FRAGMENT`; where these have fewer than `ROWS_PER_RANK` rows per rank, as many as have at most
        one sample per rank, and at most a share of the batch: max(8, min(floor(ranks / G), floor(P /
        FRAGMENTS_PER_BATCH))). One group more than that would give a few ranks the rows of a second sample.

        Example, groups of 12 samples with 9 trained steps:
            BatchRules(32, 12, rows_per_group=108, num_trainer_ranks=24)     # 8: 36 rows per rank
            BatchRules(352, 12, rows_per_group=108, num_trainer_ranks=704)   # 58: 9 rows per rank; of 8 groups, some
                                                                             # ranks have 2 and some have 1
        """
        if most_groups := number(self.gap.max_groups_per_fragment):
            return most_groups
        rows = self.group_size if self.rows_per_group is None else self.rows_per_group
        if GROUPS_PER_FRAGMENT * rows >= ROWS_PER_RANK * self.num_trainer_ranks:
            return GROUPS_PER_FRAGMENT
        most_groups = min(self.num_trainer_ranks // self.group_size, self.num_prompts // FRAGMENTS_PER_BATCH)
        return max(GROUPS_PER_FRAGMENT, most_groups)

    def slot_chunk_size(self, num_slots: int) -> int:
        """Samples of a slot's chunk: as configured, else ceil(G / replicas), at most `max_chunk_size`.

        A group is then spread over all replicas, and further slots of a replica hold the next groups; with more
        replicas than samples, a chunk is one sample and the remaining replicas work on the next groups.

        Example:
            BatchRules(8, 16).slot_chunk_size(num_slots=8)                         # 2
            BatchRules(8, 16, slots_per_replica=2).slot_chunk_size(num_slots=16)   # 2: of two groups on a replica
        """
        if not self.queue.replicate_prompts:
            return self.group_size
        if chunk_size := number(self.gap.chunk_size):
            return min(chunk_size, self.group_size)
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
        if chunk_size := number(self.tag.chunk_size):
            return (min(chunk_size, largest),)
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
        stale = self.staleness
        asynchrony = stale.max_versions - 1 + stale.fraction if stale.max_versions else 0.0
        share = min(1.0, max(0.0, asynchrony + 1 - age_versions))
        return int(self.num_prompts * share + 1e-9)  # 0.3 * 10 must be 3
