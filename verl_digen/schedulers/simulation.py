# SPDX-License-Identifier: Apache-2.0
"""The planner driven by simulated events: step times and idle times without a device. Nothing is decided here:
simulated and live runs share `BatchPlanner`, which all events of one moment (within `EPSILON_S`) reach before it is
asked.

Invariants: equal input gives equal output. With "tag" a step is never longer than without it, if durations are as
given and the search bundles no slots, whose times are then means. Busy and idle seconds of a pool add up to its slots
times the makespan. O(log events) per event, plus the planner's own.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Literal

from verl_digen.schedulers.durations import KnownDurations
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.play import EPSILON_S
from verl_digen.schedulers.rules import BatchRules
from verl_digen.schedulers.types import TRAINER, BatchReport, Chunk, Fragment, Generate, Wait

TECHNIQUES = ("gap", "tsp", "tag", "tcss")
"""gap: fragments train while others generate. tsp: time-step parallelism. tag: the trainer assists where a search says
so (BTS). tcss: the next batch begins under the current version."""

What = Literal["generate", "assist", "score", "train", "commit"]


@dataclass
class PlannerRun:
    """A simulated run of one planner and its slots, each of which is a replica of its own.

    Example:
        run = PlannerRun(rules, durations, ["a", "b"], num_batches=10, commit_s=0.3)
        run.play()
        run.commits_s    # end of each of the 10 commits
    """

    rules: BatchRules
    durations: KnownDurations
    slots: Collection[str]
    num_batches: int
    commit_s: float
    reports: list[BatchReport] = field(default_factory=list)
    commits_s: list[float] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=lambda: {TRAINER: 0.0, "generator": 0.0})
    """Pool -> busy seconds, summed over its slots."""
    busy_at_commit_s: list[dict[str, float]] = field(default_factory=list)
    """`busy_s` up to the end of each commit."""

    def make_planner(self) -> BatchPlanner:
        """The planner that is played."""
        return BatchPlanner(self.rules, self.durations, first_batch=0, num_batches=self.num_batches)

    def play(self) -> None:
        """Simulate from time 0 to the last commit."""
        self._begin()
        planner = self._planner
        is_trainer_free, now_s = True, 0.0
        while not planner.is_done:
            for batch, count in planner.prompts_wanted().items():
                planner.on_prompts(batch, [f"{self._num_prompts + index:09d}" for index in range(count)])
                self._num_prompts += count
            self._assign(now_s)
            if is_trainer_free:
                is_trainer_free = not self._work(now_s)
            now_s = self._due[0][0]
            while self._due and self._due[0][0] <= now_s + EPSILON_S:
                end_s, _, what, subject = heappop(self._due)
                is_trainer_free |= self._tell(end_s, what, subject)

    def _begin(self) -> None:
        """Make the planner, and have all slots join it."""
        planner = self._planner = self.make_planner()
        self._due: list[tuple[float, int, What, Any]] = []
        self._num_due = 0
        self._num_prompts = 0
        for slot in self.slots:
            planner.on_slot_joined(slot, replica=self._replica_of(slot), version=0)

    def _replica_of(self, slot: str) -> str:
        return slot

    def _assign(self, now_s: float) -> None:
        self._planner.take_cancelled()  # a chunk in flight ends by itself
        while decisions := self._planner.assign(now_s):
            for decision in decisions:
                if isinstance(decision, Generate):
                    self._generate(decision.slot, decision.chunk, now_s)
                else:
                    self._load(decision.slot, decision.version)

    def _generate(self, slot: str, chunk: Chunk, now_s: float) -> None:
        """Have a slot generate a chunk, sample by sample."""
        self._occupy(slot, "generate", now_s, len(chunk.samples) * self.durations.sample_s[slot], chunk)

    def _load(self, slot: str, version: int) -> None:
        """Load new weights; the time is part of `commit_s`."""
        self._planner.on_loaded(slot, version)

    def _work(self, now_s: float) -> bool:
        """Start the planner's next decision on the trainer; False if that is to wait."""
        decision = self._planner.next_for_trainer(now_s)
        if isinstance(decision, Wait):
            return False
        if isinstance(decision, BatchReport):
            what, seconds = "commit", self.commit_s
        elif isinstance(decision, Fragment):
            what, seconds = "train", self.durations.fragment_s[len(decision.uids) - 1]
        else:
            what, seconds = "assist", self.durations.assisted_s[self.rules.assist_rounds(decision.num_samples) - 1]
        self._occupy(TRAINER, what, now_s, seconds, decision)
        return True

    def _tell(self, now_s: float, what: What, subject: Any) -> bool:
        """Tell the planner that something ended; True if that frees the trainer."""
        planner = self._planner
        if what == "score":
            planner.on_scored(subject.id, dict.fromkeys(subject.samples, 0.0), subject.version, now_s)
            return False
        if what == "train":
            planner.on_trained(subject.id, now_s)
        elif what == "commit":
            self.reports.append(subject)
            self.commits_s.append(now_s)
            to_come_s = sum(end_s - now_s for end_s, _, due, _ in self._due if due == "generate")
            busy_s = self.busy_s["generator"] - to_come_s
            self.busy_at_commit_s.append({**self.busy_s, "generator": busy_s})
            planner.on_committed(subject.batch)
            planner.on_published(subject.batch + 1)
        else:
            for chunk in subject.chunks if what == "assist" else (subject,):
                planner.on_generated(chunk.id, now_s)
                self._expect(now_s + self.durations.scoring_s, "score", chunk)
        return what != "generate"

    def _expect(self, end_s: float, what: What, subject: object) -> None:
        self._num_due += 1
        heappush(self._due, (end_s, self._num_due, what, subject))

    def _occupy(self, who: str, what: What, now_s: float, seconds: float, subject: Any) -> None:
        """Keep a slot, or the trainer, busy for so long."""
        end_s = now_s + seconds
        self.busy_s[TRAINER if who == TRAINER else "generator"] += end_s - now_s
        self._expect(end_s, what, subject)
