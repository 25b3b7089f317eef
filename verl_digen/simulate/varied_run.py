# SPDX-License-Identifier: Apache-2.0
"""A simulated run of separate pools with variance: durations are drawn, and replicas die and are replaced.

    death          the slot is lost: the planner gives its samples to others, and what it did of them is lost work
    publication    a replacement is begun for every replica that died; those begun before that are ready join

which is what `verl_digen.trainer.restarts` does. The planner knows the mean durations of each device, as a run that has
measured them for a while, and none of the draws. A replacement is as fast as what it replaces.

Invariants (tests/simulate/test_varied_run.py): without variance all times are those of `PlannerRun`; a death costs the
samples in flight and the slot until a replacement joins, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify
from typing import Any

from verl_digen.require import require
from verl_digen.schedulers.durations import KnownDurations
from verl_digen.schedulers.generation import ChunkSlots, Work
from verl_digen.schedulers.rules import BatchRules
from verl_digen.schedulers.simulation import PlannerRun, What
from verl_digen.schedulers.types import Assist, Chunk, Fragment
from verl_digen.simulate.variance import Ranks, Variance


class VariedSlots(ChunkSlots):
    """Slots whose samples each take a drawn time."""

    def __init__(self, sample_s: Mapping[str, float], variance: Variance):
        super().__init__(sample_s)
        self._variance = variance

    def start(self, now_s: float) -> list[Work]:
        """Start the chunks that were begun."""
        return [
            work._replace(end_s=now_s + (work.end_s - now_s) * self._mean_factor(work.subject))
            if self._variance.jitter
            else work
            for work in super().start(now_s)
        ]

    def _mean_factor(self, chunk: Chunk) -> float:
        factors = [self._variance.factor("generate", int(chunk.uid), sample) for sample in chunk.samples]
        return sum(factors) / len(factors)


class VariedRun(PlannerRun):
    """A run of a planner with variance.

    Args:
        by_slow: slow factor -> durations where every trainer rank has it; each factor of the trainer's ranks.
        sample_s: slot -> mean seconds of a sample; the slots are on the devices after the trainer's, in their order.
    """

    def __init__(
        self,
        rules: BatchRules,
        by_slow: Mapping[float, KnownDurations],
        sample_s: Mapping[str, float],
        variance: Variance,
        ranks: Ranks,
        *,
        num_batches: int,
        commit_s: float,
        keeps_events: bool,
    ):
        super().__init__(
            rules,
            expected_durations(by_slow, sample_s, ranks),
            list(sample_s),
            num_batches=num_batches,
            commit_s=commit_s,
            keeps_events=keeps_events,
            generator=VariedSlots(sample_s, variance),
        )
        self._by_slow, self._variance, self._ranks = by_slow, variance, ranks
        self._device_of = {slot: rules.num_trainer_ranks + index for index, slot in enumerate(sample_s)}
        self._lives: dict[str, int] = dict.fromkeys(sample_s, 0)
        """Slot -> replicas that it had before."""
        self._living: set[str] = set(sample_s)
        self._working: dict[str, Work] = {}
        """Slot -> its newest work."""
        self._dead: list[str] = []
        """Slots that died since the last publication."""
        self._starting: list[tuple[str, float]] = []
        """Slots whose replacement was begun, and when it is ready."""
        self.deaths_s: list[float] = []
        """Times at which replicas died."""
        self.generated: float = 0.0
        """Samples that slots have generated and not lost."""
        self.generated_at_commit: list[float] = []
        """`generated` at each commit; a half-done sample counts as half."""

    def train_s(self, fragment: Fragment) -> float:
        """Seconds of a training call, by its slowest rank."""
        first = min(map(int, fragment.uids))
        return self._ranks.call_s(lambda slow: self._trained_s(self._by_slow[slow], fragment), "train", first)

    def assist_s(self, assist: Assist) -> float:
        """Seconds of an assist, by its slowest rank."""
        first = assist.chunks[0]
        return self._ranks.call_s(
            lambda slow: self._assisted_s(self._by_slow[slow], assist), "assist", int(first.uid), first.samples[0]
        )

    def score_s(self, chunk: Chunk) -> float:
        """Seconds until the last of a chunk's samples is scored."""
        factors = (self._variance.factor("score", int(chunk.uid), sample) for sample in chunk.samples)
        return self.durations.scoring_s * max(factors)

    # -- replicas that die ----------------------------------------------------------------------------------
    def _begin(self) -> None:
        super()._begin()
        for slot in self.slots:
            self._live(slot, 0.0)

    def _live(self, slot: str, now_s: float) -> None:
        """Note that a slot's replica has joined, and when it will die."""
        after_s = self._variance.dies_after_s(self._device_of[slot], self._lives[slot])
        if after_s != float("inf"):
            self._expect(now_s + after_s, "death", slot)

    def _expect(self, end_s: float, what: What, subject: Any) -> None:
        if what == "generate":
            self._working[subject.device] = subject
        super()._expect(end_s, what, subject)

    def _tell(self, now_s: float, what: What, subject: Any) -> bool:
        if what == "death":
            self._die(subject, now_s)
            return False
        if what == "generate":
            self.generated += len(subject.subject.samples)
            del self._working[subject.device]
        elif what == "commit":
            self.generated_at_commit.append(self.generated + sum(_done(work, now_s) for work in self._working.values()))
        is_trainer_free = super()._tell(now_s, what, subject)
        if what == "commit":
            self._publish(now_s)
        return is_trainer_free

    def _die(self, slot: str, now_s: float) -> None:
        self.deaths_s.append(now_s)
        self._living.remove(slot)
        require(
            bool(self._living),
            "--failures must leave a replica alive, because a run without any stops",
            f"none after {now_s:.0f} s",
            "lower it, or give the generator more devices",
        )
        work = self._working.pop(slot, None)
        if work is not None:
            self._due = [entry for entry in self._due if entry[3] is not work]
            heapify(self._due)
            self.busy_s["generator"] -= work.end_s - now_s
            self.events = [
                event._replace(end_s=now_s) if event[:3] == (slot, "generate", work.start_s) else event
                for event in self.events
            ]
        self._planner.on_slot_lost(slot)
        self._lives[slot] += 1
        self._dead.append(slot)

    def _publish(self, now_s: float) -> None:
        """Have ready replacements join, and begin those of replicas that died since the last publication."""
        failures = self._variance.failures
        if failures is None:
            return
        for slot, ready_s in self._starting:
            if ready_s <= now_s:
                self._planner.on_slot_joined(slot, replica=slot, version=self._planner.published)
                self._living.add(slot)
                self._live(slot, now_s)
        self._starting = [(slot, ready_s) for slot, ready_s in self._starting if ready_s > now_s]
        self._starting += [(slot, now_s + failures.replace_s) for slot in self._dead]
        self._dead = []


def _done(work: Work, now_s: float) -> float:
    """Samples of a work that are done; of a half-done chunk half."""
    seconds = work.end_s - work.start_s
    return len(work.subject.samples) * ((now_s - work.start_s) / seconds if seconds else 1.0)


def expected_durations(
    by_slow: Mapping[float, KnownDurations], sample_s: Mapping[str, float], ranks: Ranks
) -> KnownDurations:
    """Durations that the planner expects, the mean ones."""

    def expected(items: Callable[[KnownDurations], Sequence[float]]) -> list[float]:
        number = len(items(by_slow[ranks.counts[0][0]]))
        return [ranks.expected_s(lambda slow, index=index: items(by_slow[slow])[index]) for index in range(number)]

    return KnownDurations(
        sample_s=sample_s,
        assisted_s=expected(lambda durations: durations.assisted_s),
        scoring_s=by_slow[ranks.counts[0][0]].scoring_s,
        fragment_s=expected(lambda durations: durations.fragment_s),
    )
