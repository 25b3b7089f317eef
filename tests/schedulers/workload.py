# SPDX-License-Identifier: Apache-2.0
"""`PlannerRun` on the cases of the papers' figures: one chunk per fragment, and all durations known."""

from collections.abc import Collection
from typing import Any, NamedTuple

from verl_digen.schedulers.durations import KnownDurations
from verl_digen.schedulers.rules import BatchRules, GapConfig, StalenessConfig, TagConfig
from verl_digen.schedulers.simulation import PlannerRun, What
from verl_digen.schedulers.types import TRAINER, BatchReport


class Workload(NamedTuple):
    """Fragments of a step, slots, steps in a row, and with tcss the share of a step that may be one version early."""

    num_fragments: int
    num_slots: int
    num_steps: int = 1
    stale_fraction: float = 1.0


class Costs(NamedTuple):
    """Seconds of a chunk on a slot, of one on the trainer, of its scores, of a fragment's training, of a commit."""

    generate_s: float
    assist_s: float
    score_s: float
    train_s: float
    commit_s: float


class Event(NamedTuple):
    """One interval of work."""

    who: str
    """A slot, "trainer" or "scorer"."""
    what: What
    start_s: float
    end_s: float
    ids: tuple[int, ...]
    """Groups it worked on, numbered over all steps; for a commit, the step."""


class RecordedRun(PlannerRun):
    """A run that keeps its events."""

    events: list[Event]

    def _occupy(self, who: str, what: What, now_s: float, seconds: float, subject: Any) -> None:
        super()._occupy(who, what, now_s, seconds, subject)
        ids = {
            "commit": lambda: [subject.batch],
            "train": lambda: subject.uids,
            "generate": lambda: [subject.uid],
            "assist": lambda: [chunk.uid for chunk in subject.chunks],
        }[what]()
        self.events.append(Event(who, what, now_s, now_s + seconds, tuple(map(int, ids))))

    def _expect(self, end_s: float, what: What, subject: Any) -> None:
        super()._expect(end_s, what, subject)
        if what == "score":
            self.events.append(Event("scorer", what, end_s - self.durations.scoring_s, end_s, (int(subject.uid),)))


class Simulation(NamedTuple):
    """A run that was played."""

    makespan_s: float
    events: tuple[Event, ...]
    bubble_s: dict[str, float]
    """Pool -> idle seconds until `makespan_s`; of "generator" the sum over its slots."""
    reports: tuple[BatchReport, ...]


def simulate(workload: Workload, costs: Costs, techniques: Collection[str]) -> Simulation:
    """Play `workload`. Without "gap" all fragments of a step train in one call of num_fragments * train_s."""
    is_pipelined = "gap" in techniques
    slots = [f"slot{index:0{len(str(workload.num_slots - 1))}d}" for index in range(workload.num_slots)]
    durations = KnownDurations(
        sample_s=dict.fromkeys(slots, costs.generate_s),
        assisted_s=[costs.assist_s],
        scoring_s=costs.score_s,
        fragment_s=[count * costs.train_s for count in range(1, 2 if is_pipelined else workload.num_fragments + 1)],
    )
    rules = BatchRules(
        num_prompts=workload.num_fragments,
        group_size=1,
        gap=GapConfig(enable=is_pipelined, max_groups_per_fragment=1),
        tag=TagConfig(policy="bts" if "tag" in techniques else "off", chunk_size=1),
        staleness=StalenessConfig(max_versions=1 if "tcss" in techniques else 0, fraction=workload.stale_fraction),
    )
    run = RecordedRun(rules, durations, slots, workload.num_steps, costs.commit_s)
    run.events = []
    run.play()
    makespan_s = run.commits_s[-1]
    return Simulation(
        makespan_s,
        tuple(sorted(run.events, key=lambda event: (event.start_s, event.who, event.end_s))),
        {
            "trainer": makespan_s - run.busy_s[TRAINER],
            "generator": makespan_s * workload.num_slots - run.busy_s["generator"],
        },
        tuple(run.reports),
    )
