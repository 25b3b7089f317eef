# SPDX-License-Identifier: Apache-2.0
"""Published samples of a batch, and its outcome: what was trained, and what is to be cleared.

Invariant (tests/trainer/test_conductor.py): every published sample is trained or among the unwanted ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl_digen.schedulers.types import BatchReport
from verl_digen.store.keys import SampleName
from verl_digen.types import GroupTags, SampleFacts, SampleTag


@dataclass(frozen=True)
class BatchOutcome:
    """A committed batch."""

    report: BatchReport
    metrics: dict[str, float]
    """Metrics of the optimizer step."""
    slowest_decision_s: float
    """Longest time that the planner took to decide what the trainer does."""
    groups: Mapping[str, GroupTags]
    """uid -> tags of the trained samples."""
    condition_keys: frozenset[str]
    """Keys of conditions that were published for groups of the batch, trained or not, or too late for another one."""
    unwanted: Sequence[SampleName]
    """Published samples that were not trained."""
    doubtful_groups: frozenset[str]
    """uids of groups with samples whose scoring timed out: conditions of their own may have been published under keys
    that no tag names."""


@dataclass
class PublishedSamples:
    """Published samples of one batch's groups."""

    groups: dict[str, dict[int, SampleTag]] = field(default_factory=dict)
    """uid -> sample index -> tag of the sample that is used."""
    names: list[SampleName] = field(default_factory=list)
    """All samples: used ones, those that came too late or were generated again since, and those whose scoring timed
    out, which may have been published."""
    condition_keys: set[str] = field(default_factory=set)
    """Keys under which conditions may have been published."""
    doubtful_groups: set[str] = field(default_factory=set)
    """uids of groups with samples whose scoring timed out."""

    def add(self, tag: SampleTag, *, is_wanted: bool) -> None:
        """Add a sample, which if wanted is used by its group. One that its group has was generated before a restart
        under newer weights, and is not used from now on."""
        self.condition_keys.update(tag.turn_keys)
        self.names.append(SampleName.of(tag.facts))
        if is_wanted:
            self.groups.setdefault(tag.facts.uid, {})[tag.facts.sample_index] = tag

    def doubt(self, names: Sequence[SampleName], condition_key: str) -> None:
        """Add samples whose scoring timed out."""
        self.names.extend(names)
        self.condition_keys.add(condition_key)
        self.doubtful_groups.update(name.uid for name in names)

    def outcome(self, report: BatchReport, metrics: dict[str, float], slowest_decision_s: float) -> BatchOutcome:
        groups = {uid: self.groups[uid] for uid in sorted(report.uids)}
        trained = {SampleName.of(tag.facts) for tags in groups.values() for tag in tags.values()}
        return BatchOutcome(
            report,
            metrics,
            slowest_decision_s,
            groups=groups,
            condition_keys=frozenset(self.condition_keys),
            unwanted=[name for name in self.names if name not in trained],
            doubtful_groups=frozenset(self.doubtful_groups),
        )


def check_one_version(facts: SampleFacts) -> None:
    """Raise RuntimeError unless the sample was generated under one weight version."""
    if facts.version != facts.last_version:
        raise RuntimeError(
            f"sample {facts.sample_index} of group {facts.uid} was generated under weight versions {facts.version} and "
            f"{facts.last_version}; it must be one"
        )
