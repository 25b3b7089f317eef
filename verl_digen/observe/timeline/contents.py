# SPDX-License-Identifier: Apache-2.0
"""Contents of a step's picture: the lanes shown, the height of each part in rows, and the texts. Pure; `gantt` draws.

*Invariants:* the strip holds the same seconds as the accounts; a pool's part of the picture is never taller than that
of `MAX_LANES` lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from verl_digen.observe.timeline.analysis import (
    LABELS,
    Span,
    Usage,
    by_lane,
    num_trained_samples,
    overlap_s,
    pool_usage,
    segments,
    step_window,
)
from verl_digen.observe.timeline.interval import POOLS, UNATTRIBUTED, Interval

MAX_LANES = 16
"""Lanes of one pool that are drawn each; rows of more would be too thin to read."""
NUM_SAMPLE_LANES = 4
"""Lanes drawn below the strip of a pool that has more."""
STRIP_ROWS = 4
"""Height of that strip, in rows."""
NUM_BINS = 900
"""Time bins of that strip: about one per pixel."""
STRIP_GAP_ROWS = 0.4
"""Space below that strip."""
HEADING_ROWS = 1.25
"""Height of a pool's heading."""


class Block:
    """The part of the picture that shows one pool."""

    def __init__(self, pool: str, lanes: Mapping[str, list[Interval]], usage: Usage | None, max_lanes: int):
        """
        Args:
            lanes: name -> intervals.
            usage: None for a pool without devices.
        """
        self.pool = pool
        self.lanes = lanes
        self.usage = usage
        self.has_strip = len(lanes) > max_lanes
        self.shown = dict(list(lanes.items())[:NUM_SAMPLE_LANES]) if self.has_strip else lanes
        heard = sum(num_devices_of(of_lane) for of_lane in lanes.values())
        self.num_silent = usage.num_devices - heard if usage else 0

    @property
    def num_rows(self) -> float:
        strip = STRIP_ROWS + STRIP_GAP_ROWS if self.has_strip else 0
        silent = 1 if self.num_silent and not self.has_strip else 0
        return HEADING_ROWS + strip + len(self.shown) + silent

    @property
    def heading(self) -> str:
        """Text about the pool, next to its name."""
        parts = []
        if self.has_strip:
            parts.append(f"{len(self.lanes)} lanes: the share of them at each work, then the first {len(self.shown)}")
        if self.usage:
            parts.append(f"{self.usage.num_devices} device{'s' if self.usage.num_devices > 1 else ''}")
            parts.append(f"busy {self.usage.busy_fraction:.1%}")
            parts.append(f"bubble {self.usage.bubble_fraction:.1%}" + causes_text(self.usage))
        return "  ·  ".join(parts)


def blocks_of(
    intervals: Sequence[Interval], step: int, num_devices: Mapping[str, int], *, max_lanes: int = MAX_LANES
) -> list[Block]:
    """The parts of a step's picture, from the top down: pools in the order of `POOLS`."""
    usages = pool_usage(intervals, step, num_devices)
    lanes: dict[str, dict[str, list[Interval]]] = {pool: {} for pool in usages}
    for name, of_lane in by_lane(intervals, step_window(intervals, step)).items():
        lanes.setdefault(of_lane[0].lane.pool, {})[name] = of_lane
    return [Block(pool, lanes[pool], usages.get(pool), max_lanes) for pool in POOLS if pool in lanes]


def utilisation(
    lanes: Mapping[str, list[Interval]], window: Span, *, silent: int = 0, num_bins: int = NUM_BINS
) -> dict[str, np.ndarray]:
    """Label -> [num_bins] the share of the lanes' devices spent on it; the shares of a bin add up to 1.

    Args:
        silent: devices without a lane: unattributed. Lanes without devices count as one each.
    """
    bin_s = (window[1] - window[0]) / num_bins
    seconds = {label: np.zeros(num_bins) for label in LABELS}
    seconds[UNATTRIBUTED] += silent * bin_s
    total = float(silent)
    edges_s = bin_s * np.arange(num_bins + 1)
    for of_lane in lanes.values():
        weight = num_devices_of(of_lane) or 1
        total += weight
        for start_s, end_s, label in segments(of_lane, window):
            first, last = np.searchsorted(edges_s, (start_s, end_s), side="right") - 1
            last = min(last, num_bins - 1)
            covered = np.minimum(edges_s[first + 1 : last + 2], end_s) - np.maximum(edges_s[first : last + 1], start_s)
            seconds[label][first : last + 1] += weight * covered
    return {label: spent / (total * bin_s) for label, spent in seconds.items() if spent.any()}


def step_marks(intervals: Iterable[Interval]) -> dict[float, int]:
    """Moment -> the step that begins there, by the driver's clock."""
    marks: dict[float, int] = {}
    for interval in intervals:
        if interval.kind == "step":
            marks[interval.start_s] = interval.step
            marks.setdefault(interval.end_s, interval.step + 1)
    return marks


def version_marks(intervals: Iterable[Interval]) -> dict[int, float]:
    """Weight version -> its first use: the end of its first publication."""
    first_s: dict[int, float] = {}
    for interval in intervals:
        if interval.kind == "publish" and interval.version is not None:
            at_s = interval.end_s
            first_s[interval.version] = min(at_s, first_s[interval.version]) if interval.version in first_s else at_s
    return first_s


def headline(intervals: Sequence[Interval], step: int, num_devices: Mapping[str, int]) -> tuple[str, str]:
    """Title of the picture, and the step's numbers beside it."""
    window = step_window(intervals, step)
    step_s = window[1] - window[0]
    parts = [f"{step_s:.4g} s"]
    num_samples = num_trained_samples(intervals, step)
    if num_samples:
        rate = num_samples / step_s
        told = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        parts.append(f"{told} images/s on {sum(num_devices.values())} devices")
    usages = pool_usage(intervals, step, num_devices)
    parts += [f"{pool} bubble {usage.bubble_fraction:.1%}" for pool, usage in usages.items()]
    overlap = overlap_s(intervals, window)
    if overlap:
        parts.append(f"overlap {overlap / step_s:.0%}")
    return f"Step {step}", "  ·  ".join(parts)


def causes_text(usage: Usage) -> str:
    """The largest causes of idle time, e.g. ` (no_chunk_left 8.1%, slot_lost 2.0%)`."""
    causes = sorted(usage.bubble_s.items(), key=lambda cause: -cause[1])
    told = [f"{reason} {seconds / usage.capacity_s:.1%}" for reason, seconds in causes[:3] if seconds > 0]
    return f" ({', '.join(told)})" if told else ""


def bar_text(interval: Interval, groups: str) -> str:
    """Text on an interval's bar.

    Args:
        groups: label of its groups.
    """
    if interval.kind == "wait":
        return str(interval.reason)
    if interval.kind == "publish" and interval.version is not None:
        return f"v{interval.version}"
    return groups or (interval.kind if interval.kind in ("commit", "save", "validate") else "")


def num_devices_of(of_lane: list[Interval]) -> int:
    """Devices that a lane stands for, as its last interval says."""
    return max(of_lane, key=lambda interval: interval.start_s).lane.num_devices
