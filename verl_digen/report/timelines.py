# SPDX-License-Identifier: Apache-2.0
"""Chosen steps of a run's timeline, for the page: the first, the slowest, the last, and some between them.

*Invariants:* at most `MAX_STEPS` steps, each with at most `MAX_LANES` lanes of a pool and `MAX_BARS` bars.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_digen.observe.timeline.analysis import around_step, by_lane, pool_usage, step_metrics, step_window
from verl_digen.observe.timeline.file import NAME, Timeline, read_timeline
from verl_digen.observe.timeline.interval import UNATTRIBUTED, Interval
from verl_digen.observe.timeline.trace import group_label, group_names, rows
from verl_digen.report.curves import rounded, thinned

MAX_STEPS, MAX_LANES, MAX_BARS = 6, 12, 1200
MAX_BYTES = 32_000_000
"""Read of the end of the file; a longer one shows its newest steps."""

KINDS: dict[str, dict[str, str]] = {
    "generate": {"words": "generating", "colour": "#0072B2"},
    "score": {"words": "scoring", "colour": "#CC79A7"},
    "train": {"words": "training", "colour": "#E69F00"},
    "assist": {"words": "trainer generates", "colour": "#009E73"},
    "commit": {"words": "optimizer step", "colour": "#D55E00"},
    "wake": {"words": "reward wakes", "colour": "#8C6BB1"},
    "sleep": {"words": "reward goes to sleep", "colour": "#4D4D4D"},
    "publish": {"words": "sending weights", "colour": "#56B4E9"},
    "validate": {"words": "validation", "colour": "#F0E442"},
    "save": {"words": "checkpoint", "colour": "#7F7F7F"},
    "wait": {"words": "waiting", "colour": "#EDEEF0"},
}
"""Kind of a bar -> how it is shown, in the order of the page's key."""
CAUSES: dict[str, str] = {
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
    UNATTRIBUTED: "not recorded",
}
"""Words for reasons to wait."""


def timelines(run_dir: Path) -> dict[str, Any]:
    """`steps` of the timeline, and the words and colours of their `kinds`. ValueError if the file is broken."""
    path = run_dir / NAME
    if not path.is_file():
        return {"steps": [], "kinds": {}, "is_there": False, "is_whole": True}
    timeline = read_timeline(path, most_bytes=MAX_BYTES)
    is_whole = path.stat().st_size <= MAX_BYTES
    return {
        "steps": [_shown(timeline, step, word) for step, word in _chosen(timeline, is_whole=is_whole)],
        "kinds": KINDS,
        "is_there": True,
        "is_whole": is_whole,
    }


def _chosen(timeline: Timeline, *, is_whole: bool) -> list[tuple[int, str]]:
    """(step, why), by step. A step that lasted no time is left out."""
    lasted = {
        interval.step: interval.duration_s
        for interval in timeline.intervals
        if interval.kind == "step" and interval.duration_s > 0
    }
    steps = sorted(lasted) if is_whole else sorted(lasted)[1:]  # the first one is not all there
    if not steps:
        return []
    slowest = max(steps, key=lasted.__getitem__)
    chosen = sorted({slowest, *thinned(steps, MAX_STEPS - 1)})
    return [(step, "slowest" if step == slowest and len(steps) > 1 else "") for step in chosen]


def _shown(timeline: Timeline, step: int, word: str) -> dict[str, Any]:
    window = step_window(timeline.intervals, step)
    of_step = around_step(timeline.intervals, step)
    num_devices = timeline.num_devices[step]
    names = group_names(of_step)
    lanes, bars, num_lanes = [], [], Counter[str]()
    for name, of_lane in by_lane(of_step, window).items():
        pool = of_lane[0].lane.pool
        num_lanes[pool] += 1
        if num_lanes[pool] > MAX_LANES:
            continue
        slots = rows(of_lane)
        lanes.append({"name": name, "host": of_lane[-1].lane.host, "rows": max(slots) + 1})
        for interval, row in zip(of_lane, slots, strict=True):
            bars.append(_bar(interval, len(lanes) - 1, row, window, step, group_label(interval, names)))
    longest = sorted(sorted(bars, key=lambda bar: -bar["s"])[:MAX_BARS], key=lambda bar: (bar["lane"], bar["at"]))
    return {
        "step": step,
        "word": word,
        "step_s": rounded(window[1] - window[0]),
        "headline": _headline(step_metrics(of_step, step, num_devices), num_devices, window[1] - window[0]),
        "pools": _pools(of_step, step, num_devices),
        "lanes": lanes,
        "bars": longest,
        "num_lanes_left_out": num_lanes.total() - len(lanes),
        "num_bars_left_out": len(bars) - len(longest),
    }


def _bar(
    interval: Interval, lane: int, row: int, window: tuple[float, float], step: int, groups: str
) -> dict[str, Any]:
    """One bar, cut at the step's begin and end."""
    start_s, end_s = max(interval.start_s, window[0]), min(interval.end_s, window[1])
    facts = [KINDS[interval.kind]["words"] if interval.reason is None else CAUSES[interval.reason]]
    if interval.step != step:
        facts.append(f"for step {interval.step}")
    if groups:
        facts.append(groups)
    if interval.num_samples:
        facts.append(f"{interval.num_samples} samples")
    if interval.version is not None:
        facts.append(f"weights {interval.version}")
    if "reward" in interval.detail:
        facts.append(str(interval.detail["reward"]))
    return {
        "lane": lane,
        "row": row,
        "kind": interval.kind,
        "at": round(start_s - window[0], 4),
        "s": round(end_s - start_s, 4),
        "text": " · ".join(facts),
        "pale": interval.step != step,
    }


def _headline(metrics: Mapping[str, float], num_devices: Mapping[str, int], step_s: float) -> str:
    """The step's numbers in words."""
    parts = [f"{step_s:.3g} s"]
    if per_s := metrics["perf/images_per_s"]:
        parts.append(f"{per_s:.3g} samples/s on {sum(num_devices.values())} devices")
    if overlap := metrics["perf/overlap_s"]:
        parts.append(f"trainer and generators at work together for {overlap / step_s:.0%}")
    return " · ".join(parts)


def _pools(intervals: Sequence[Interval], step: int, num_devices: Mapping[str, int]) -> list[dict[str, Any]]:
    return [
        {
            "pool": pool,
            "devices": usage.num_devices,
            "busy": rounded(usage.busy_fraction),
            "idle": rounded(usage.bubble_fraction),
            "causes": [[CAUSES[reason], rounded(share), reason == UNATTRIBUTED] for reason, share in usage.causes],
        }
        for pool, usage in pool_usage(intervals, step, num_devices).items()
    ]
