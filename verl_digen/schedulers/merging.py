# SPDX-License-Identifier: Apache-2.0
"""Size of a fragment: should the trainer train what is ready, or wait for the next group and train more at once?

A training call has a fixed part: weights are gathered, and few rows leave ranks without work. Waiting for a group that
is nearly there saves one such part, and leaves the trainer idle meanwhile.

- The groups to come are played forward: slots take the chunks of the oldest group as soon as they are free, and a group
  is ready `score_s` after its last chunk. After `HORIZON` groups the rest arrives at the mean pace of the slots.
- On these ready times, r_1 <= ... <= r_n, the earliest end of training is exact. F(j), the earliest time at which the
  first j groups are trained, is the minimum over k <= max_groups of max(F(j - k), r_j) + call_s + k group_s.
- It is computed twice, with a first fragment of the ready groups, and with one of more groups. The second must end
  training earlier, by more than `LATE` of the wait.

Invariants (tests/schedulers/test_merging.py)
- F(n) is the earliest end over all ways to cut the groups into fragments.
- A call without a fixed part never waits. Equal input gives equal output.
- A predicted moment is waited for once: if it passes without a further group, the ready ones train.

Complexity of a decision: O(HORIZON * G * log S + P * max_groups), with G samples per group, S slots, P groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from verl_digen.schedulers.batch import Batch, LiveChunk, Request
from verl_digen.schedulers.durations import Durations
from verl_digen.schedulers.rules import BatchRules
from verl_digen.schedulers.types import TRAINER

HORIZON = 32
"""Groups to come that are played chunk by chunk: four fragments of the default size."""

EPSILON_S = 1e-7
"""Ends closer than this are equal: the trainer does not wait."""

LATE = 0.25
"""Share of a wait by which the group may be late, before waiting has lost what it was to gain."""


@dataclass(frozen=True)
class Merge:
    """Prediction that a larger first fragment ends the batch earlier."""

    wait_s: float
    """Seconds until its last group is ready."""
    gain_s: float
    """Seconds by which training ends earlier than if the ready groups train now."""


@dataclass
class Merging:
    """The decision whenever the trainer is free and has ready groups.

    Example, two groups ready, a third one in 0.1 s:
        merging = Merging()
        merging.wait_s(10.0, 2, lambda: Merge(wait_s=0.1, gain_s=0.9))    # 0.1
        merging.wait_s(10.1, 2, lambda: Merge(wait_s=0.1, gain_s=0.9))    # None: it is late, two train
        merging.forget()                                                  # they do
    """

    _until_s: float | None = None
    _num_ready: int = 0

    def wait_s(self, now_s: float, num_ready: int, find: Callable[[], Merge | None]) -> float | None:
        """Seconds to wait for a further group; None: train the ready ones now.

        Args:
            find: makes the prediction; asked once for a number of ready groups.
        """
        if self._until_s is None or num_ready != self._num_ready:
            merge = find()
            self._until_s, self._num_ready = now_s + (merge.wait_s if merge is not None else 0.0), num_ready
        left_s = self._until_s - now_s
        return left_s if left_s > EPSILON_S else None

    def forget(self) -> None:
        """Drop the prediction: the ready groups train."""
        self._until_s = None


def find_merge(
    now_s: float,
    batch: Batch,
    slots: Collection[str],
    requests: Collection[Request],
    live: Mapping[int, LiveChunk],
    durations: Durations,
    rules: BatchRules,
) -> Merge | None:
    """The larger fragment that is worth waiting for; None if there is none, or if too little is measured."""
    train_s = durations.train_s()
    if train_s is None or train_s[0] <= 0 or len(batch.ready) >= rules.largest_fragment:
        return None
    ready_s = ready_times(now_s, batch, slots, requests, live, durations, rules)
    return None if ready_s is None else best_merge(ready_s, *train_s, rules.largest_fragment)


def ready_times(
    now_s: float,
    batch: Batch,
    slots: Collection[str],
    requests: Collection[Request],
    live: Mapping[int, LiveChunk],
    durations: Durations,
    rules: BatchRules,
) -> list[float] | None:
    """Seconds until each untrained group that fills the batch is ready, ascending, 0 for ready ones.

    None if there is no slot, or a duration is not measured yet.
    """
    score_s = durations.score_s()
    sample_s = {slot: durations.generate_sample_s(slot) for slot in slots}
    known_s = {slot: seconds for slot, seconds in sample_s.items() if seconds is not None}
    if score_s is None or not known_s or len(known_s) < len(sample_s):
        return None
    free_s = dict.fromkeys(slots, 0.0)
    scored_s: dict[int, float] = {}
    for request in requests:
        if request.generator != TRAINER:
            end_s = request.since_s + len(request.chunk.samples) * known_s[request.generator]
            free_s[request.generator] = max(0.0, end_s - now_s)
            scored_s[request.chunk.id] = free_s[request.generator] + score_s
    for chunk in live.values():
        if chunk.generated_s is not None:
            scored_s[chunk.chunk.id] = max(0.0, chunk.generated_s + score_s - now_s)
    num_left = rules.num_prompts - batch.num_training - batch.num_trained
    ready = [0.0] * min(num_left, len(batch.ready))
    times = [(time_s, slot) for slot, time_s in free_s.items()]
    heapify(times)
    size = rules.slot_chunk_size(len(slots))
    for group in batch.groups:
        if len(ready) == min(num_left, len(batch.ready) + HORIZON):
            break
        if group.state != "open":
            continue
        last_s = max((scored_s.get(chunk_id, 0.0) for chunk_id in group.chunks), default=0.0)
        for first in range(0, len(group.unissued), size):
            time_s, slot = times[0]
            end_s = time_s + min(size, len(group.unissued) - first) * known_s[slot]
            heapreplace(times, (end_s, slot))
            last_s = max(last_s, end_s + score_s)
        ready.append(last_s)
    ready.sort()
    pace_s = rules.group_size / sum(1 / seconds for seconds in known_s.values())
    while len(ready) < num_left:
        ready.append(ready[-1] + pace_s)
    return ready


def best_merge(ready_s: Sequence[float], call_s: float, group_s: float, max_groups: int) -> Merge | None:
    """The larger first fragment that ends training first; None if training the ready groups now ends no later.

    Args:
        ready_s: as of `ready_times`. call_s, group_s: fixed seconds of a training call, and seconds per group.
    """
    num_ready = sum(time_s <= EPSILON_S for time_s in ready_s)
    largest = min(max_groups, len(ready_s))
    if not 0 < num_ready < largest or call_s <= 0:
        return None
    now_s, _ = _earliest_end(ready_s, call_s, group_s, max_groups, {num_ready})
    later_s, size = _earliest_end(ready_s, call_s, group_s, max_groups, set(range(num_ready + 1, largest + 1)))
    wait_s, gain_s = ready_s[size - 1], now_s - later_s
    return Merge(wait_s, gain_s) if gain_s > EPSILON_S + LATE * wait_s else None


def _earliest_end(
    ready_s: Sequence[float], call_s: float, group_s: float, max_groups: int, first_sizes: Collection[int]
) -> tuple[float, int]:
    """Earliest end of training all groups, and the size of the first fragment, which is one of `first_sizes`."""
    infinite = float("inf")
    ends: list[tuple[float, int]] = [(infinite, 0)] * (len(ready_s) + 1)
    for count in range(1, len(ready_s) + 1):
        best = (infinite, 0)
        if count in first_sizes:
            best = (ready_s[count - 1] + call_s + count * group_s, count)
        for size in range(1, min(max_groups, count - 1) + 1):
            end_s, first = ends[count - size]
            best = min(best, (max(end_s, ready_s[count - 1]) + call_s + size * group_s, first))
        ends[count] = best
    return ends[-1]
