# SPDX-License-Identifier: Apache-2.0
"""The picture of a step: a row per lane, a colour per kind of work, and idle time that stands out.

- Colours are those of `legend`; waits are also hatched, and work for another step is paler.
- A pool of more than `MAX_LANES` lanes is shown as one tall strip, the share of its lanes doing each thing at each
  moment, above its first `NUM_SAMPLE_LANES` lanes; the pool's heading says so.
- Time on device lanes that no interval covers is pink.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from verl_digen.observe.timeline.analysis import Span, lane_usage, step_window
from verl_digen.observe.timeline.contents import (
    HEADING_ROWS,
    MAX_LANES,
    NUM_BINS,
    STRIP_GAP_ROWS,
    STRIP_ROWS,
    Block,
    bar_text,
    blocks_of,
    headline,
    num_devices_of,
    step_marks,
    utilisation,
    version_marks,
)
from verl_digen.observe.timeline.interval import BUSY_KINDS, UNATTRIBUTED, Interval
from verl_digen.observe.timeline.layout import group_label, group_names, rows
from verl_digen.observe.timeline.legend import COLOURS, KIND_WORDS, UNATTRIBUTED_WORDS, words_of

MARGIN = 0.012
"""Time shown before and after the step, as a fraction of it."""

WIDTH_IN, ROW_IN = 15.0, 0.34
LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN = 1.35, 0.75, 0.8, 0.95
DPI = 110

HATCH = "#BFC4CA"
"""Lines across a wait."""
INK, FAINT, PINK = "#1F2328", "#7B828A", "#F9D9DC"
"""Text and lines; secondary text; time that no interval covers."""
PALE = 0.45
"""Colour strength of work for another step."""


class Bar(NamedTuple):
    """One interval as drawn."""

    interval: Interval
    left_s: float
    width_s: float


def draw_step(
    intervals: Sequence[Interval], step: int, num_devices: Mapping[str, int], path: Path, *, max_lanes: int = MAX_LANES
) -> None:
    """Write the picture of a step as PNG.

    Args:
        intervals: with cut ones joined, as `read_timeline` gives them.
        num_devices: pool -> devices.
        max_lanes: lanes of a pool beyond which it is shown as a strip.
    """
    blocks = blocks_of(intervals, step, num_devices, max_lanes=max_lanes)
    window = step_window(intervals, step)
    picture = _Picture(intervals, step, window, num_rows=sum(block.num_rows for block in blocks))
    for block in blocks:
        picture.add(block)
    picture.finish(headline(intervals, step, num_devices))
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.figure.savefig(path)


class _Picture:
    """The figure while it is drawn, from the top down."""

    def __init__(self, intervals: Sequence[Interval], step: int, window: Span, num_rows: float):
        self._intervals = intervals
        self._step = step
        self._start_s, self._step_s = window[0], window[1] - window[0]
        self._view = (-MARGIN * self._step_s, (1 + MARGIN) * self._step_s)
        self._names = group_names(intervals)
        self._labels_seen: set[str] = set()
        self._reached = 0.0
        height_in = TOP_IN + BOTTOM_IN + ROW_IN * num_rows
        self.figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white")
        FigureCanvasAgg(self.figure)
        body_in = WIDTH_IN - LEFT_IN - RIGHT_IN
        self._axes = self.figure.add_axes(
            (LEFT_IN / WIDTH_IN, BOTTOM_IN / height_in, body_in / WIDTH_IN, ROW_IN * num_rows / height_in)
        )
        self._axes.set_xlim(*self._view)
        self._axes.set_ylim(num_rows, 0)
        self._px_per_s = body_in * DPI / (self._view[1] - self._view[0])
        self._height_in = height_in

    # -- from the top down --------------------------------------------------------------------------------
    def add(self, block: Block) -> None:
        middle = self._reached + HEADING_ROWS - 0.4
        self._beside(block.pool, middle, 0, -6, "right", INK, size=10.5, weight="bold")
        self._axes.annotate(
            block.heading,
            (0, middle),
            xytext=(7, 0),
            textcoords="offset points",
            size=8.5,
            color=FAINT,
            va="center_baseline",
        )
        self._reached += HEADING_ROWS
        if block.has_strip:
            self._add_strip(block)
        for name, of_lane in block.shown.items():
            self._add_lane(name, of_lane)
        if block.num_silent and not block.has_strip:
            self._fill(0, self._step_s, 0.1, 0.8, PINK)
            self._left_text(f"{block.num_silent} unheard of", self._reached + 0.5)
            self._labels_seen.add(UNATTRIBUTED)
            self._reached += 1

    def _add_lane(self, name: str, of_lane: list[Interval]) -> None:
        if num_devices_of(of_lane):
            self._fill(0, self._step_s, 0.1, 0.8, PINK)
        in_row = rows(of_lane)
        height = 0.8 / (max(in_row) + 1)
        for row in range(max(in_row) + 1):
            bars = [self._bar(interval) for interval, own in zip(of_lane, in_row, strict=True) if own == row]
            self._add_bars(bars, self._reached + 0.1 + row * height, height)
        usage = lane_usage(of_lane, (self._start_s, self._start_s + self._step_s))
        if num_devices_of(of_lane) and UNATTRIBUTED in usage.bubble_s:
            self._labels_seen.add(UNATTRIBUTED)
        self._left_text(name, self._reached + 0.5)
        self._right_text(f"{usage.busy_fraction:.0%}", self._reached + 0.5)
        self._reached += 1

    def _add_bars(self, bars: list[Bar], top: float, height: float) -> None:
        """Draw the bars of one row, bars of the same look together; labels where they fit."""
        looks: dict[tuple[str, bool, bool], list[Bar]] = {}
        for bar in bars:
            is_own = bar.interval.step == self._step
            is_wide = bar.width_s * self._px_per_s > 10
            looks.setdefault((bar.interval.kind, is_own, is_wide), []).append(bar)
        for (kind, is_own, is_wide), group in looks.items():
            is_wait = kind == "wait"
            self._axes.broken_barh(
                [(bar.left_s, bar.width_s) for bar in group],
                (top, height),
                facecolor=COLOURS[kind] if is_own or is_wait else _pale(kind),
                hatch="////" if is_wait else None,
                edgecolor=HATCH if is_wait else "white",
                linewidth=0.0 if is_wait or not is_wide else 0.7,
                zorder=2 if is_wait else 3,
            )
            self._labels_seen.add(kind)
            if not is_own and not is_wait:
                self._labels_seen.add("another step")
        for bar in bars if height > 0.3 else []:
            self._label(bar, top + height / 2, size=7.5 if height > 0.6 else 6.0)

    def _label(self, bar: Bar, middle: float, size: float) -> None:
        text = bar_text(bar.interval, group_label(bar.interval, self._names))
        if not text or len(text) * size * DPI / 72 * 0.62 + 8 > bar.width_s * self._px_per_s:
            return
        is_wait, is_own = bar.interval.kind == "wait", bar.interval.step == self._step
        is_dark = bar.interval.kind in ("generate", "assist", "commit", "save") and is_own
        box = {"boxstyle": "square,pad=0.15", "facecolor": COLOURS["wait"], "edgecolor": "none"} if is_wait else None
        self._axes.text(
            bar.left_s + bar.width_s / 2,
            middle,
            text,
            color="white" if is_dark else INK,
            size=size,
            ha="center",
            va="center_baseline",
            style="italic" if is_wait else "normal",
            bbox=box,
            zorder=4,
        )

    def _add_strip(self, block: Block) -> None:
        """Draw the share of the pool's devices at each kind of work, stacked; waits on top, the rest stays pink."""
        top, bottom = self._reached + 0.1, self._reached + STRIP_ROWS
        self._fill(0, self._step_s, 0.1, STRIP_ROWS - 0.1, PINK)
        window = (self._start_s, self._start_s + self._step_s)
        shares = utilisation(block.lanes, window, silent=block.num_silent)
        edges = np.linspace(0.0, self._step_s, NUM_BINS + 1)
        below = np.zeros(NUM_BINS)
        for label, share in shares.items():
            if label == UNATTRIBUTED:
                if share.any():
                    self._labels_seen.add(UNATTRIBUTED)
                continue
            is_work = label in BUSY_KINDS
            self._labels_seen.add(label if is_work else "wait")
            above = below + share
            lower, upper = (bottom - (bottom - top) * np.append(level, level[-1]) for level in (below, above))
            self._axes.fill_between(
                edges,
                lower,
                upper,
                step="post",
                facecolor=COLOURS[label if is_work else "wait"],
                hatch=None if is_work else "////",
                edgecolor="none" if is_work else HATCH,
                linewidth=0.0,
                zorder=3 if is_work else 2,
            )
            below = above
        for text, y in (("100 %", top + 0.25), ("50 %", (top + bottom) / 2), ("0 %", bottom - 0.25)):
            self._left_text(text, y, color=FAINT)
        self._axes.hlines(
            (top + bottom) / 2, 0, self._step_s, color="white", linewidth=0.6, linestyle=(0, (4, 4)), zorder=4
        )
        if block.usage:
            self._right_text(f"{block.usage.busy_fraction:.0%}", (top + bottom) / 2)
        self._reached += STRIP_ROWS + STRIP_GAP_ROWS

    # -- around it ----------------------------------------------------------------------------------------
    def finish(self, titles: tuple[str, str]) -> None:
        axes = self._axes
        axes.set_yticks([])
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.tick_params(axis="x", colors=INK, labelsize=8.5)
        axes.set_xlabel("seconds since the step began", size=9, color=INK)
        axes.grid(axis="x", color="#E3E5E8", linewidth=0.6, zorder=0)
        axes.set_axisbelow(True)
        self._mark_steps()
        self._mark_versions()
        self._right_text("busy", 0.62, color=FAINT)
        title_y = 1 - 0.34 / self._height_in
        bold = self.figure.text(
            0.3 / WIDTH_IN, title_y, titles[0], size=15, weight="bold", color=INK, va="center_baseline"
        )
        axes.annotate(
            f"    {titles[1]}", (1, 0), xycoords=bold, size=10.5, color=INK, va="bottom", annotation_clip=False
        )
        self._add_legend()

    def _mark_steps(self) -> None:
        """Draw a line where a step begins or ends."""
        for at_s, step in step_marks(self._intervals).items():
            at = at_s - self._start_s
            if self._view[0] <= at <= self._view[1]:
                self._axes.axvline(at, color=INK, linewidth=1.0, zorder=5)
                self._axes.annotate(
                    f"step {step}",
                    (at, 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(0, 3),
                    textcoords="offset points",
                    size=8,
                    color=INK,
                    ha="center",
                )

    def _mark_versions(self) -> None:
        """Mark the first use of each weight version."""
        for version, at_s in version_marks(self._intervals).items():
            at = at_s - self._start_s
            if self._view[0] <= at <= self._view[1]:
                self._axes.axvline(at, color=COLOURS["publish"], linewidth=1.2, linestyle=(0, (2, 2)), zorder=5)
                self._axes.annotate(
                    f"▼ v{version}",
                    (at, 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(-3.5, 13),
                    textcoords="offset points",
                    size=8,
                    color="#1B7FB8",
                    weight="bold",
                )

    def _add_legend(self) -> None:
        handles: list[Any] = [
            Patch(facecolor=colour, label=words_of(kind))
            for kind, colour in COLOURS.items()
            if kind in self._labels_seen and kind != "wait"
        ]
        if "another step" in self._labels_seen:
            handles.append(Patch(facecolor=_pale("generate"), label="paler: for another step"))
        if "wait" in self._labels_seen:
            wait = Patch(
                facecolor=COLOURS["wait"], edgecolor=HATCH, hatch="////", linewidth=0, label=KIND_WORDS["wait"]
            )
            handles.append(wait)
        if UNATTRIBUTED in self._labels_seen:
            handles.append(Patch(facecolor=PINK, label=UNATTRIBUTED_WORDS))
        self.figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(LEFT_IN / WIDTH_IN - 0.008, 0.02),
            ncols=len(handles),
            frameon=False,
            fontsize=9,
            handlelength=1.6,
            columnspacing=1.6,
        )

    # -- small strokes ------------------------------------------------------------------------------------
    def _bar(self, interval: Interval) -> Bar:
        left_s = max(interval.start_s - self._start_s, self._view[0])
        right_s = min(interval.end_s - self._start_s, self._view[1])
        return Bar(interval, left_s, right_s - left_s)

    def _fill(self, left_s: float, right_s: float, inset: float, height: float, colour: str) -> None:
        self._axes.broken_barh([(left_s, right_s - left_s)], (self._reached + inset, height), color=colour, zorder=1)

    def _left_text(self, text: str, y: float, color: str = INK) -> None:
        self._beside(text, y, 0, -6, "right", color)

    def _right_text(self, text: str, y: float, color: str = INK) -> None:
        self._beside(text, y, 1, 34, "right", color)

    def _beside(
        self, text: str, y: float, x: float, offset_pt: float, ha: Any, color: str, size: float = 8.5, **look: Any
    ) -> None:
        self._axes.annotate(
            text,
            (x, y),
            xycoords=("axes fraction", "data"),
            xytext=(offset_pt, 0),
            textcoords="offset points",
            ha=ha,
            va="center_baseline",
            size=size,
            color=color,
            annotation_clip=False,
            **look,
        )


def _pale(kind: str) -> str:
    red, green, blue = (1 - PALE * (1 - part) for part in to_rgb(COLOURS[kind]))
    return to_hex((red, green, blue))
