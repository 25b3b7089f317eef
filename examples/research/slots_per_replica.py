# SPDX-License-Identifier: Apache-2.0
"""Simulated steps of separate pools with one or two chunks in flight per replica.

    python examples/research/slots_per_replica.py

The live planner on replicas that generate one batch at a time, of samples of one group. A batch of n samples takes
`fixed + n * sample`; then its answers come, the chunk is reported and the next one is requested, which takes
`ANSWER_S`. A chunk that waits on the replica meanwhile starts at once.

Each number is seconds per step relative to one slot: 0.97 is 3 % faster. Nothing is measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_digen.schedulers.durations import KnownDurations
from verl_digen.schedulers.rules import BatchRules, StalenessConfig
from verl_digen.schedulers.simulation import PlannerRun
from verl_digen.schedulers.types import Chunk

FULL_S = 4.0
"""Seconds of a full batch."""
ANSWER_S = 0.05
MAX_BATCH = 8
NUM_STEPS = 6
WAYS = (1, 2)
"""Slots per replica."""
BATCH: Any = "batch"
"""End of a batch on a replica."""


@dataclass
class BatchingRun(PlannerRun):
    """A simulated run in which each replica works on one batch of the chunks that wait there."""

    replicas: Mapping[str, str] = field(default_factory=dict)
    """Slot -> its replica, which loads new weights when all of its slots are free."""
    fixed_s: float = 0.0
    batch_sample_s: float = 0.0
    _waiting: dict[str, list[Chunk]] = field(default_factory=lambda: defaultdict(list))
    _at_work: set[str] = field(default_factory=set)
    _unloaded: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def _replica_of(self, slot: str) -> str:
        return self.replicas[slot]

    def _load(self, slot: str, version: int) -> None:
        replica = self.replicas[slot]
        self._unloaded[replica].append(slot)
        if len(self._unloaded[replica]) == [*self.replicas.values()].count(replica):
            for unloaded in sorted(self._unloaded.pop(replica)):
                super()._load(unloaded, version)

    def _generate(self, slot: str, chunk: Chunk, now_s: float) -> None:
        self._waiting[self.replicas[slot]].append(chunk)

    def _assign(self, now_s: float) -> None:
        super()._assign(now_s)
        for replica, waiting in self._waiting.items():
            if replica in self._at_work or not waiting:
                continue
            batch: list[Chunk] = []
            for chunk in waiting:
                fits = sum(len(other.samples) for other in (*batch, chunk)) <= MAX_BATCH
                if fits and chunk.uid == waiting[0].uid:
                    batch.append(chunk)
            self._waiting[replica] = [chunk for chunk in waiting if chunk not in batch]
            self._at_work.add(replica)
            size = sum(len(chunk.samples) for chunk in batch)
            self._expect(now_s + self.fixed_s + size * self.batch_sample_s, BATCH, (replica, batch))

    def _tell(self, now_s: float, what: Any, subject: Any) -> bool:
        if what != BATCH:
            return super()._tell(now_s, what, subject)
        replica, batch = subject
        self._at_work.discard(replica)
        for chunk in batch:
            self._expect(now_s + ANSWER_S, "generate", chunk)
        return False


@dataclass(frozen=True)
class Case:
    """A run: P prompts of G samples, R replicas, and the durations."""

    num_prompts: int
    group_size: int
    num_replicas: int
    fixed: float
    """Share of a full batch's time that a batch takes whatever its size."""

    def step_s(self, slots: int, train_s: float, max_versions: int) -> float:
        """Seconds per step.

        Args:
            train_s: of a group.
        """
        replica_of = {
            f"{number:03d}/{slot}": f"{number:03d}" for number in range(self.num_replicas) for slot in range(slots)
        }
        rules = BatchRules(
            self.num_prompts,
            self.group_size,
            staleness=StalenessConfig(max_versions=max_versions),
            max_chunk_size=MAX_BATCH,
            slots_per_replica=slots,
        )
        run = BatchingRun(
            rules,
            KnownDurations(
                dict.fromkeys(replica_of, FULL_S / MAX_BATCH), [1.0], 0.1, [n * train_s for n in range(1, 9)]
            ),
            list(replica_of),
            num_batches=NUM_STEPS,
            commit_s=0.5,
            replicas=replica_of,
            fixed_s=self.fixed * FULL_S,
            batch_sample_s=(1 - self.fixed) * FULL_S / MAX_BATCH,
        )
        run.play()
        return run.commits_s[-1] / NUM_STEPS


def main() -> None:
    print("   P  G  R  fixed  train/generate  mode    " + "  ".join(f"{slots:>8}" for slots in WAYS))
    for num_prompts, group_size, num_replicas in ((32, 16, 8), (48, 24, 16), (16, 16, 8), (32, 16, 2)):
        for fixed in (0.0, 0.2):
            case = Case(num_prompts, group_size, num_replicas, fixed)
            generating_s = case.step_s(1, 0.0, 0)
            for share in (0.5, 0.9, 1.0):
                for max_versions, mode in ((0, "strict"), (1, "tcss")):
                    train_s = share * generating_s / num_prompts
                    seconds = [case.step_s(slots, train_s, max_versions) for slots in WAYS]
                    row = "  ".join(f"{value / seconds[0]:8.3f}" for value in seconds)
                    sizes = f"{num_prompts:>4} {group_size:>2} {num_replicas:>2}"
                    print(f"{sizes} {fixed:>6.0%} {share:>15.0%}  {mode:<8}{row}", flush=True)


if __name__ == "__main__":
    main()
