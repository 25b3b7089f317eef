# SPDX-License-Identifier: Apache-2.0
"""Layout shared by page and trace: rows for intervals that overlap on a lane, names of groups, words and colours. Pure.

*Invariants:* two intervals of one row never overlap; no more rows are used than intervals overlap at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from verl_digen.observe.timeline.interval import UNATTRIBUTED, Interval, Kind
from verl_digen.schedulers.types import WaitReason

COLOURS: dict[str, str] = {
    "generate": "#0072B2",
    "score": "#CC79A7",
    "train": "#E69F00",
    "assist": "#009E73",
    "commit": "#D55E00",
    "wake": "#8C6BB1",
    "sleep": "#4D4D4D",
    "publish": "#56B4E9",
    "validate": "#F0E442",
    "save": "#7F7F7F",
    "wait": "#EDEEF0",
}
KIND_WORDS: dict[Kind, str] = {
    "train": "training",
    "assist": "trainer generates",
    "generate": "generating",
    "commit": "optimizer step",
    "score": "scoring",
    "wake": "reward wakes",
    "sleep": "reward goes to sleep",
    "publish": "sending weights",
    "validate": "validation",
    "save": "checkpoint",
    "wait": "waiting",
    "step": "step",
}
REASON_WORDS: dict[WaitReason, str] = {
    "no_fragment_ready": "groups are still being generated",
    "waiting_pays": "assisting would lengthen the batch",
    "gain_in_doubt": "the gain of assisting is in doubt",
    "costs_unknown": "the cost of assisting is not measured yet",
    "no_slots": "no replica is there",
    "scoring": "rewards are outstanding",
    "prompts": "prompts are awaited",
    "batch_done": "no batch is left",
    "staleness_bound": "new weights are awaited",
    "no_chunk_left": "no chunk of the batch is left",
    "slot_lost": "a lost replica is being replaced",
}
UNATTRIBUTED_WORDS = "not recorded"


def words_of(label: str) -> str:
    """Words for a kind, a reason to wait, or `UNATTRIBUTED`."""
    return {**KIND_WORDS, **REASON_WORDS, UNATTRIBUTED: UNATTRIBUTED_WORDS}[label]


def rows(intervals: Sequence[Interval]) -> list[int]:
    """The row of each interval of one lane: the lowest that is free when it starts. A lane with one slot has row 0."""
    assigned = [0] * len(intervals)
    free: list[int] = []
    taken: list[tuple[float, int]] = []  # (end, row), a heap
    for position in sorted(range(len(intervals)), key=lambda p: (intervals[p].start_s, intervals[p].end_s)):
        interval = intervals[position]
        while taken and taken[0][0] <= interval.start_s:
            heapq.heappush(free, heapq.heappop(taken)[1])
        row = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (interval.end_s, row))
        assigned[position] = row
    return assigned


def group_names(intervals: Iterable[Interval]) -> dict[tuple[int, str], str]:
    """(step, uid) -> g1, g2, ...: a step's groups in the order in which their generation began."""
    began: dict[tuple[int, str], float] = {}
    for interval in intervals:
        if interval.kind in ("generate", "assist"):
            for uid in interval.group_ids:
                key = (interval.step, uid)
                began[key] = min(interval.start_s, began[key]) if key in began else interval.start_s
    names: dict[tuple[int, str], str] = {}
    counts: dict[int, int] = {}
    for step, uid in sorted(began, key=lambda key: (began[key], key)):
        counts[step] = counts[step] + 1 if step in counts else 1
        names[step, uid] = f"g{counts[step]}"
    return names


def group_label(interval: Interval, names: dict[tuple[int, str], str]) -> str:
    """`g3`, `g3+g5`, `g1..g8`: the groups of an interval in short; empty where it has none or they have no name."""
    numbers = sorted(int(names[interval.step, uid][1:]) for uid in interval.group_ids if (interval.step, uid) in names)
    if len(numbers) > 2:
        return f"g{numbers[0]}..g{numbers[-1]}"
    return "+".join(f"g{number}" for number in numbers)
