# SPDX-License-Identifier: Apache-2.0
"""The timeline as JSON for `chrome://tracing` and https://ui.perfetto.dev (the "Trace Event Format").

- A pool is a process; a lane is a thread, or several where a replica works on several chunks at once.
- Every interval is a complete event (`ph: "X"`), microseconds since the first; its facts are its `args`.
- An arrow leads from each chunk of a group to the training of that group.
- Names of groups (g1, g2, ...) count in the order in which they were begun; their uids are in `args`.

*Invariants:* `ts` and `dur` are >= 0 and `ts` ascends; events of one thread never overlap partly (the viewers would
draw them wrong); every arrow starts inside a generate or assist event and ends at the train event of its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from verl_digen.observe.timeline.analysis import Span, by_lane
from verl_digen.observe.timeline.interval import POOLS, Interval, Pool, to_line
from verl_digen.observe.timeline.layout import group_label, group_names, rows


def to_trace(intervals: Sequence[Interval], window: Span) -> dict[str, Any]:
    """The trace of the intervals that reach into the window; write it with `json.dump`.

    Args:
        intervals: with cut ones joined, as `read_timeline` gives them.
        window: e.g. a step's, from `step_window`; (-inf, inf) for the whole run.
    """
    shown = [interval for interval in intervals if interval.start_s < window[1] and interval.end_s > window[0]]
    base_s = min((interval.start_s for interval in shown), default=0.0)
    names = group_names(intervals)
    processes: dict[Pool, list[Thread]] = {
        "driver": [Thread("steps", [interval for interval in shown if interval.kind == "step"])]
    }
    for of_lane in by_lane(shown, window).values():
        processes.setdefault(of_lane[0].lane.pool, []).extend(_threads(of_lane))
    metadata: list[dict[str, Any]] = []
    placed: list[tuple[Interval, dict[str, Any]]] = []
    tids = count(1)  # no number twice, and no 0, which Perfetto takes for the idle process
    for pid, pool in enumerate(POOLS, start=1):
        if pool not in processes:
            continue
        metadata += [
            _metadata("process_name", pid, 0, name=pool),
            _metadata("process_sort_index", pid, 0, sort_index=pid),
        ]
        for thread in processes[pool]:
            tid = next(tids)
            metadata += [
                _metadata("thread_name", pid, tid, name=thread.name),
                _metadata("thread_sort_index", pid, tid, sort_index=tid),
            ]
            placed += [(interval, _event(interval, pid, tid, base_s, names)) for interval in thread.intervals]
    events = [event for _, event in placed] + _arrows(placed, names)
    events.sort(key=lambda event: (event["ts"], event["ph"] != "X"))  # an arrow after the event it binds to
    return {"traceEvents": metadata + events, "displayTimeUnit": "ms", "otherData": {"start_unix_s": base_s}}


class Thread(NamedTuple):
    """A row of the viewer."""

    name: str
    intervals: list[Interval]


def _threads(of_lane: list[Interval]) -> list[Thread]:
    """The rows of one lane."""
    in_row = rows(of_lane)
    lane = of_lane[0].lane
    return [
        Thread(
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
