# SPDX-License-Identifier: Apache-2.0
"""Invariants of every run under any faults: recorded during a run, and checked at its end.

| kind | means |
| --- | --- |
| lost | a drawn group is neither trained nor dropped; a batch is too small; a row is not there when it is trained |
| duplicated | a sample is trained twice, or by some ranks only |
| mixed | weights differ from a sample's label, are too old, or are not those to validate; a reward is another's |
| leaked | rows or conditions of finished batches are left; a run ends with a gradient open |
| stuck | a deadlock: no event is left |
| crashed | the run ends by anything but `RunStopped`, or because of a fault that it must survive |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

ProblemKind = Literal["lost", "duplicated", "mixed", "leaked", "stuck", "crashed"]
KINDS: tuple[ProblemKind, ...] = get_args(ProblemKind)


def reward_of(seed: int) -> float:
    """The reward of the sample whose noise, or first pixel, is `seed`: known, and equal for some of a group."""
    return float(seed % 256 % 3)


@dataclass(frozen=True)
class Problem:
    kind: ProblemKind
    text: str


@dataclass
class Checks:
    """The records of a run, written by its processes and by its driver.

    Args:
        group_size: G. num_ranks: trainer ranks. max_versions: maximum staleness of a group.
    """

    group_size: int
    num_ranks: int
    max_versions: int
    problems: list[Problem] = field(default_factory=list)
    drawn: dict[str, int] = field(default_factory=dict)
    """uid -> batch."""
    trained: dict[int, dict[int, list[str]]] = field(default_factory=dict)
    """Batch -> rank -> uids that it accumulated and committed."""
    validating: dict[str, int] = field(default_factory=dict)
    """uid of a validation prompt -> version that is validated."""
    settled: dict[str, int] = field(default_factory=dict)
    """uid -> the batch that trained it."""

    def note(self, kind: ProblemKind, text: str) -> None:
        self.problems.append(Problem(kind, text))

    def require(self, holds: bool, kind: ProblemKind, text: str) -> None:
        if not holds:
            self.note(kind, text)

    # -- while a run goes ----------------------------------------------------------------------------------
    def on_trajectory(self, uid: str, *, label: int, first: int, last: int) -> None:
        """Check a trajectory with version `label`; the weights were `first` at its beginning and `last` at its end."""
        self.require(label == first == last, "mixed", f"{uid} says version {label}, had weights {first} to {last}")
        if uid in self.validating:
            self.require(
                label == self.validating[uid], "mixed", f"validation after {self.validating[uid]} used version {label}"
            )

    def on_fragment(self, batch: int, samples: Mapping[str, list[tuple[int, int]]]) -> None:
        """Record that a rank accumulates groups: uid -> (sample index, version) of its samples."""
        for uid, members in samples.items():
            indices, versions = [index for index, _ in members], {version for _, version in members}
            self.require(len(indices) == len(set(indices)), "duplicated", f"{uid} has samples {indices}")
            self.require(
                set(indices) == set(range(self.group_size)), "lost", f"{uid} is trained with samples {indices}"
            )
            self.require(len(versions) == 1, "mixed", f"{uid} is trained with versions {sorted(versions)}")
            ages = {batch - version for version in versions}
            self.require(
                ages <= set(range(self.max_versions + 1)), "mixed", f"{uid} is {sorted(ages)} versions old in {batch}"
            )
            self.require(self.drawn.get(uid) == batch, "lost", f"{uid}, drawn for {self.drawn.get(uid)}, is in {batch}")

    def on_commit(self, rank: int, batch: int, uids: list[str]) -> None:
        """Record that a rank takes the optimizer step on what it accumulated."""
        self.require(len(uids) == len(set(uids)), "duplicated", f"rank {rank} trains {uids} in batch {batch}")
        self.trained.setdefault(batch, {})[rank] = uids

    def on_outcome(self, batch: int, outcome: Any, rules: Any) -> None:
        """Check the conductor's outcome of a batch: a `BatchOutcome`, under `BatchRules`."""
        report, groups = outcome.report, sorted(outcome.groups)
        for rank in range(self.num_ranks):
            trained = sorted(self.trained.get(batch, {}).get(rank, []))
            self.require(trained == groups, "duplicated", f"batch {batch}: rank {rank} trained {trained}, not {groups}")
        for uid in groups:
            self.require(uid not in self.settled, "duplicated", f"{uid} is trained in {batch} again")
            self.settled[uid] = batch
            for index, tag in outcome.groups[uid].items():
                self.require(
                    tag.reward == reward_of(tag.facts.seed), "mixed", f"{uid}_{index} has the reward {tag.reward}"
                )
        drawn = [uid for uid, number in self.drawn.items() if number == batch]
        dropped = sum(report.dropped.values())
        self.require(
            len(groups) == report.num_groups and len(drawn) == report.num_groups + dropped,
            "lost",
            f"batch {batch}: {len(drawn)} groups drawn, {report.num_groups} trained and {dropped} dropped",
        )
        self.require(
            report.num_groups == rules.num_prompts or report.num_group_refills == rules.max_group_refills,
            "lost",
            f"batch {batch}: {report.num_groups} groups of {rules.num_prompts} without the refills used up",
        )
        for age in range(1, self.max_versions + 1):
            stale = sum(count for found, count in report.stale_groups.items() if found >= age)
            self.require(
                stale <= rules.stale_allowance(age), "mixed", f"batch {batch}: {stale} groups {age} versions stale"
            )

    # -- when it is over -----------------------------------------------------------------------------------
    def on_end(self, left: Mapping[str, Sequence[str]]) -> None:
        """Check a run that was not stopped; `left`: partition -> keys that will not be cleared any more."""
        for partition, keys in left.items():
            self.require(not keys, "leaked", f"{len(keys)} rows left in {partition!r}: {list(keys)[:4]}")
