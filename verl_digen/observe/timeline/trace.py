# SPDX-License-Identifier: Apache-2.0
"""Layout of a timeline's pictures, which the page shares, and the timeline as JSON for `chrome://tracing` and
https://ui.perfetto.dev (the "Trace Event Format"): a pool is a process; a lane is a thread, or several where a replica
works on several chunks at once. Pure.

*Invariants:* two intervals of one row never overlap; no more rows are used than intervals overlap at once; `ts` and
`dur` are >= 0 and `ts` ascends; events of one thread never overlap partly (the viewers would draw them wrong); every
arrow starts inside a generate or assist event and ends at the train event of its group.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from verl_digen.observe.timeline.analysis import Span, by_lane
from verl_digen.observe.timeline.interval import POOLS, Interval, Pool, to_line

Thread = tuple[Pool, str, list[Interval]]
"""(pool, name, intervals) of a row of the viewer."""


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
    generating = (interval for interval in intervals if interval.kind in ("generate", "assist"))
    names: dict[tuple[int, str], str] = {}
    counts: Counter[int] = Counter()
    for _, step, uid in sorted((one.start_s, one.step, uid) for one in generating for uid in one.group_ids):
        if (step, uid) not in names:
            counts[step] += 1
            names[step, uid] = f"g{counts[step]}"
    return names


def group_label(interval: Interval, names: dict[tuple[int, str], str]) -> str:
    """`g3`, `g3+g5`, `g1..g8`: the groups of an interval in short; empty where it has none or they have no name."""
    numbers = sorted(int(names[interval.step, uid][1:]) for uid in interval.group_ids if (interval.step, uid) in names)
    if len(numbers) > 2:
        return f"g{numbers[0]}..g{numbers[-1]}"
    return "+".join(f"g{number}" for number in numbers)


def to_trace(intervals: Sequence[Interval], window: Span) -> dict[str, Any]:
    """Trace of the intervals (cut ones joined) that reach into the window, such as `step_window`'s; for `json.dump`."""
    shown = [interval for interval in intervals if interval.start_s < window[1] and interval.end_s > window[0]]
    base_s = min((interval.start_s for interval in shown), default=0.0)
    names = group_names(intervals)
    threads: list[Thread] = [("driver", "steps", [interval for interval in shown if interval.kind == "step"])]
    threads += [thread for of_lane in by_lane(shown, window).values() for thread in _threads(of_lane)]
    metadata: list[dict[str, Any]] = []
    placed: list[tuple[Interval, dict[str, Any]]] = []
    pids = {pool: POOLS.index(pool) + 1 for pool, _, _ in threads}
    for pool, pid in pids.items():
        metadata.append(_metadata("process_name", pid, 0, name=pool))
        metadata.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
    for tid, (pool, name, of_thread) in enumerate(threads, start=1):  # Perfetto takes 0 for the idle process
        pid = pids[pool]
        metadata.append(_metadata("thread_name", pid, tid, name=name))
        metadata.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
        placed += [(interval, _event(interval, pid, tid, base_s, names)) for interval in of_thread]
    events = [event for _, event in placed] + _arrows(placed, names)
    events.sort(key=lambda event: (event["ts"], event["ph"] != "X"))  # an arrow after the event it binds to
    return {"traceEvents": metadata + events, "displayTimeUnit": "ms", "otherData": {"start_unix_s": base_s}}


def _threads(of_lane: list[Interval]) -> list[Thread]:
    """The rows of one lane."""
    in_row = rows(of_lane)
    lane = of_lane[0].lane
    return [
        (
            lane.pool,
            f"{lane.name} on {lane.host}" + (f", slot {row}" if max(in_row) > 0 else ""),
            [interval for interval, own in zip(of_lane, in_row, strict=True) if own == row],
        )
        for row in range(max(in_row) + 1)
    ]


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _event(interval: Interval, pid: int, tid: int, base_s: float, names: dict[tuple[int, str], str]) -> dict[str, Any]:
    # whole nanoseconds, so that adjacent intervals do not overlap by rounding
    start_ns, end_ns = round((interval.start_s - base_s) * 1e9), round((interval.end_s - base_s) * 1e9)
    return {
        "ph": "X",
        "name": _title(interval, names),
        "cat": interval.kind,
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": {name: value for name, value in to_line(interval).items() if name not in ("kind", "start_s", "end_s")},
    }


def _title(interval: Interval, names: dict[tuple[int, str], str]) -> str:
    if interval.kind == "step":
        return f"step {interval.step}"
    if interval.kind == "wait":
        return f"wait: {interval.reason}"
    if interval.kind == "publish" and interval.version is not None:
        return f"publish v{interval.version}"
    return f"{interval.kind} {group_label(interval, names)}".rstrip()


def _arrows(placed: list[tuple[Interval, dict[str, Any]]], names: dict[tuple[int, str], str]) -> list[dict[str, Any]]:
    """Arrows from each chunk of a group to the first row that trains the group."""
    trained: dict[tuple[int, str], dict[str, Any]] = {}
    for interval, event in placed:
        if interval.kind == "train":
            for uid in interval.group_ids:
                trained.setdefault((interval.step, uid), event)
    arrows: list[dict[str, Any]] = []
    for interval, event in placed:
        for uid in interval.group_ids if interval.kind in ("generate", "assist") else ():
            if (interval.step, uid) not in trained:
                continue
            target = trained[interval.step, uid]
            shared = {"name": names[interval.step, uid], "cat": "group", "id": len(arrows) // 2}
            # it binds to the event around its own moment, so it leaves within the last nanosecond
            leaves_us = max(event["ts"], event["ts"] + event["dur"] - 0.001)
            arrows.append({"ph": "s", **shared, "pid": event["pid"], "tid": event["tid"], "ts": leaves_us})
            arrows.append(
                {"ph": "f", "bp": "e", **shared, "pid": target["pid"], "tid": target["tid"], "ts": target["ts"]}
            )
    return arrows
