# SPDX-License-Identifier: Apache-2.0
"""Published samples of a batch, and its outcome: what was trained, and what is to be cleared.

Invariant (tests/trainer/test_conductor.py): every published sample is trained or among the unwanted ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl_digen.schedulers.types import BatchReport
from verl_digen.store.keys import SampleName
from verl_digen.types import GroupTags, SampleTag


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
    """uids of groups with samples whose scoring timed out: conditions of their own may have been published under keys
    that no tag names."""

    def add(self, tag: SampleTag, *, is_wanted: bool) -> None:
        """Add a sample, which if wanted is used by its group. One that its group has was generated before a restart
        under newer weights, and is not used from now on. RuntimeError if it has several weight versions."""
        facts = tag.facts
        if facts.version != facts.last_version:
            raise RuntimeError(
                f"sample {facts.sample_index} of group {facts.uid} was generated under weight versions {facts.version} "
                f"and {facts.last_version}; it must be one"
            )
        self.condition_keys.update(tag.turn_keys)
        self.names.append(SampleName.of(facts))
        if is_wanted:
            self.groups.setdefault(facts.uid, {})[facts.sample_index] = tag

    def doubt(self, names: Sequence[SampleName], condition_key: str) -> None:
        """Add samples whose scoring timed out."""
        self.names.extend(names)
        self.condition_keys.add(condition_key)
        self.doubtful_groups.update(name.uid for name in names)


@dataclass(frozen=True)
class BatchOutcome:
    """A committed batch."""

    report: BatchReport
    metrics: dict[str, float]
    """Metrics of the optimizer step."""
    slowest_decision_s: float
    """Longest time that the planner took to decide what the trainer does."""
    published: PublishedSamples
    """Samples of groups of the batch, trained or not, and those that came too late for another one."""

    @property
    def groups(self) -> Mapping[str, GroupTags]:
        """uid -> tags of the trained samples."""
        return {uid: self.published.groups[uid] for uid in sorted(self.report.uids)}

    @property
    def unwanted(self) -> Sequence[SampleName]:
        """Published samples that were not trained."""
        trained = {SampleName.of(tag.facts) for tags in self.groups.values() for tag in tags.values()}
        return [name for name in self.published.names if name not in trained]
