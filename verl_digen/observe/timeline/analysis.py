# SPDX-License-Identifier: Apache-2.0
"""Time accounting of a step, from its intervals: work, and idle time by cause. Pure.

- A step lasts as long as its `step` interval, and every device of a pool counts for all of it. All work in that time
  counts, whichever step it serves; where intervals of a lane overlap, the time counts once.
- Idle time is a bubble. Its cause is the reason of the wait that covers it. Time that no interval covers, and devices
  without a lane, are `unattributed`: an instrumentation gap, shown as such.

docs/metrics.md lists the metrics.

*Invariants:* busy and bubble seconds of a pool add up to its devices x the step's duration; the order of the intervals
does not matter; cutting an interval in two changes nothing.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from verl_digen.observe.metrics import union_s
from verl_digen.observe.timeline.interval import BUSY_KINDS, POOLS, UNATTRIBUTED, WAIT_REASONS, Interval, join_parts

Span = tuple[float, float]
"""(start, end) in seconds."""

LABELS: tuple[str, ...] = (*BUSY_KINDS, *WAIT_REASONS, UNATTRIBUTED)
"""Labels of a lane's time. Where several overlap, the first in this order gets the time: work before waiting."""
_RANK = {label: rank for rank, label in enumerate(LABELS)}

OVERLAPPING = {"trainer": ("train", "assist", "commit"), "generator": ("generate",)}
"""Pool -> its work that can overlap with the other's."""


@dataclass(frozen=True)
class Usage:
    """Device-seconds of a pool in one step."""

    num_devices: int
    step_s: float
    busy_s: Mapping[str, float]
    """Kind -> device-seconds; kinds that occurred."""
    bubble_s: Mapping[str, float]
    """Wait reason -> device-seconds; reasons that occurred, and `unattributed`."""

    @property
    def capacity_s(self) -> float:
        """num_devices x step_s."""
        return self.num_devices * self.step_s

    @property
    def bubble_fraction(self) -> float:
        return fsum(self.bubble_s.values()) / self.capacity_s

    @property
    def busy_fraction(self) -> float:
        return fsum(self.busy_s.values()) / self.capacity_s

    @property
    def causes(self) -> list[tuple[str, float]]:
        """(reason, share of the capacity) of the bubbles, the largest first."""
        largest = sorted(self.bubble_s.items(), key=lambda bubble: -bubble[1])
        return [(reason, seconds / self.capacity_s) for reason, seconds in largest if seconds > 0]


def step_window(intervals: Iterable[Interval], step: int) -> Span:
    """Start and end of a step. Raises ValueError: the step has no `step` interval, or one of 0 s."""
    frames = [interval for interval in intervals if interval.kind == "step" and interval.step == step]
    if not frames:
        raise ValueError(f"step {step} must have a `step` interval, which the driver writes at its end, got none")
    frame = max(frames, key=lambda interval: interval.end_s)
    if frame.duration_s <= 0:
        raise ValueError(f"step {step} must last longer than 0 s, got {frame.start_s} s to {frame.end_s} s")
    return frame.start_s, frame.end_s


def around_step(intervals: Iterable[Interval], step: int) -> list[Interval]:
    """All intervals of every step that overlaps `step` in time: enough to show it, without the rest of a long run."""
    everything = list(intervals)
    start_s, end_s = step_window(everything, step)
    steps = {interval.step for interval in everything if interval.start_s <= end_s and interval.end_s >= start_s}
    return [interval for interval in everything if interval.step in steps]


def by_lane(intervals: Iterable[Interval], window: Span) -> dict[str, list[Interval]]:
    """Lane name -> its intervals that reach into the window, without `step`; in the order of `POOLS` and index."""
    lanes: dict[str, list[Interval]] = defaultdict(list)
    for interval in intervals:
        if interval.kind != "step" and interval.start_s < window[1] and interval.end_s > window[0]:
            lanes[interval.lane.name].append(interval)
    return dict(sorted(lanes.items(), key=lambda item: (POOLS.index((lane := item[1][0].lane).pool), lane.index)))


def lane_seconds(intervals: Iterable[Interval], window: Span) -> dict[str, float]:
    """Label -> seconds of one lane's window.

    Example: generate 0-4, publish 3-6, wait 5-9 in a window 0-10 -> generate 4, publish 2, wait 3, unattributed 1.
    """
    start_s, end_s = window
    marks: list[tuple[float, int, int]] = []
    for interval in intervals:
        # relative to the window, so that sums do not lose the digits that unix seconds take
        begin, end = max(interval.start_s, start_s) - start_s, min(interval.end_s, end_s) - start_s
        if begin < end:
            rank = _RANK[interval.kind if interval.reason is None else interval.reason]
            marks += [(begin, 1, rank), (end, -1, rank)]
    spent: dict[str, list[float]] = defaultdict(list)
    active: list[int] = [_RANK[UNATTRIBUTED]]  # ascending; the first gets the time
    reached = 0.0
    for at, change, rank in [*sorted(marks), (end_s - start_s, 0, 0)]:
        if at > reached:
            spent[LABELS[active[0]]].append(at - reached)
            reached = at
        if change > 0:
            insort(active, rank)
        elif change < 0:
            active.remove(rank)
    return {label: fsum(parts) for label, parts in spent.items()}


def pool_usage(intervals: Sequence[Interval], step: int, num_devices: Mapping[str, int]) -> dict[str, Usage]:
    """Pool -> its usage in a step, for every pool of `num_devices` with devices, in the order of `POOLS`. ValueError if
    its lanes stand for more devices than it has."""
    window = step_window(intervals, step)
    lanes = by_lane(intervals, window)
    seen: dict[str, int] = defaultdict(int)
    spent: dict[str, dict[str, list[float]]] = {pool: defaultdict(list) for pool in num_devices}
    for lane_intervals in lanes.values():
        lane = max(lane_intervals, key=lambda interval: interval.start_s).lane
        if lane.num_devices == 0:
            continue
        seen[lane.pool] += lane.num_devices
        if lane.pool not in num_devices or seen[lane.pool] > num_devices[lane.pool]:
            raise ValueError(
                f"the lanes of pool {lane.pool} must stand for at most the devices it has, got {seen[lane.pool]} of "
                f"{dict(num_devices)} in step {step}; a replacement takes the index of the lane it replaces"
            )
        for label, seconds in lane_seconds(lane_intervals, window).items():
            spent[lane.pool][label].append(lane.num_devices * seconds)
    step_s = window[1] - window[0]
    usages: dict[str, Usage] = {}
    for pool in POOLS:
        if pool in num_devices and num_devices[pool] > 0:
            spent[pool][UNATTRIBUTED].append((num_devices[pool] - seen[pool]) * step_s)
            seconds = {label: fsum(spent[pool][label]) for label in LABELS if label in spent[pool]}
            busy = {kind: seconds[kind] for kind in BUSY_KINDS if kind in seconds}
            bubble = {reason: seconds[reason] for reason in seconds if reason not in busy}
            usages[pool] = Usage(num_devices[pool], step_s, busy, bubble)
    return usages


def overlap_s(intervals: Iterable[Interval], window: Span) -> float:
    """Seconds in which the trainer's work and the generator's ran at the same time."""
    spans: dict[str, list[Span]] = {"trainer": [], "generator": []}
    for interval in intervals:
        start_s, end_s = max(interval.start_s, window[0]), min(interval.end_s, window[1])
        if start_s < end_s and interval.kind in OVERLAPPING.get(interval.lane.pool, ()):
            spans[interval.lane.pool].append((start_s, end_s))
    training, generating = spans.values()
    # |A and B| = |A| + |B| - |A or B|
    return max(0.0, union_s(training) + union_s(generating) - union_s(training + generating))


def num_trained_samples(intervals: Iterable[Interval], step: int) -> int:
    """Samples of the fragments that a step trained; a fragment counts once, however many lanes share it."""
    samples = {
        interval.fragment_id: interval.num_samples
        for interval in intervals
        if interval.kind == "train" and interval.step == step
    }
    return sum(samples.values())


def first_group_fraction(intervals: Iterable[Interval], step: int) -> float | None:
    """Time until the step's first group was wholly generated, as a fraction of the step's generation, from the start of
    the first chunk to the end of the last, on any lane. A chunk that was retried counts with its last attempt. None if
    no chunk has a group id, or generation took 0 s."""
    chunks: dict[int | str | None, Interval] = {}
    for interval in join_parts(intervals):
        if interval.kind in ("generate", "assist") and interval.step == step and interval.group_ids:
            chunks[interval.chunk_id] = interval
    complete_s: dict[str, float] = {}
    for chunk in chunks.values():
        for group in chunk.group_ids:
            complete_s[group] = max(chunk.end_s, complete_s[group]) if group in complete_s else chunk.end_s
    if not complete_s:
        return None
    start_s = min(chunk.start_s for chunk in chunks.values())
    generation_s = max(complete_s.values()) - start_s
    return (min(complete_s.values()) - start_s) / generation_s if generation_s > 0 else None


def step_metrics(intervals: Sequence[Interval], step: int, num_devices_per_pool: Mapping[str, int]) -> dict[str, float]:
    """The `perf/*` metrics of a step, `first_group_fraction` only where it has a value. `intervals`: at least those
    that reach into the step or serve it; `num_devices_per_pool`: e.g. {"trainer": 16, "generator": 16}."""
    window = step_window(intervals, step)
    metrics: dict[str, float] = {}
    for pool, usage in pool_usage(intervals, step, num_devices_per_pool).items():
        metrics[f"perf/bubble_fraction/{pool}"] = usage.bubble_fraction
        metrics |= {f"perf/bubble_s/{pool}/{reason}": seconds for reason, seconds in usage.bubble_s.items()}
        metrics |= {f"perf/busy_s/{pool}/{kind}": seconds for kind, seconds in usage.busy_s.items()}
    images_per_s = num_trained_samples(intervals, step) / (window[1] - window[0])
    metrics["perf/overlap_s"] = overlap_s(intervals, window)
    metrics["perf/images_per_s"] = images_per_s
    metrics["perf/images_per_s_per_device"] = images_per_s / sum(num_devices_per_pool.values())
    fraction = first_group_fraction(intervals, step)
    if fraction is not None:
        metrics["perf/first_group_fraction"] = fraction
    return metrics
