# SPDX-License-Identifier: Apache-2.0
"""Picture of several runs: the work of each device over one time axis, from the steady state on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl_digen.schedulers.simulation import Event
from verl_digen.schedulers.types import TRAINER
from verl_digen.simulate.cluster import Outcome
from verl_digen.simulate.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "train": "#2b6cb0",
    "assist": "#ed8936",
    "commit": "#2d3748",
    "score": "#b7b7b7",
    "switch": "#e53e3e",
    "generate": "#38a169",
}
NEXT_BATCH = "#9ae6b4"
"""Colour for generation of every other batch, so that early generation is visible."""

LANE_HEIGHT = 0.8


def busy_steps(
    events: Iterable[Event], start_s: float, end_s: float, num_slots: int
) -> tuple[list[float], list[float]]:
    """(times, busy share from that time on) of generation within [start_s, end_s], times from 0."""
    changes: dict[float, int] = {}
    for event in events:
        if event.what == "generate" and event.end_s > start_s and event.start_s < end_s:
            begin = max(event.start_s, start_s) - start_s
            changes[begin] = changes.get(begin, 0) + 1
            changes[event.end_s - start_s] = changes.get(event.end_s - start_s, 0) - 1
    times, shares, num_busy = [0.0], [0.0], 0
    for time_s in sorted(changes):
        num_busy += changes[time_s]
        times.append(time_s)
        shares.append(num_busy / num_slots)
    return times, shares


def draw(profile: Profile, runs: Sequence[Outcome], path: Path) -> None:
    """Write the picture of `runs`, which kept their events, to `path`; its suffix is the format."""
    from matplotlib.figure import Figure  # slow to import, and needed for pictures only
    from matplotlib.patches import Patch

    horizon_s = max(run.step_s for run in runs)
    figure = Figure(figsize=(11, 0.9 + 0.95 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axis, run in zip(axes, runs, strict=True):
        _draw_run(axis, profile, run, horizon_s)
    axes[-1].set_xlabel("seconds of the steady state")
    axes[0].set_xlim(0, horizon_s)
    names = {"train": "train", "assist": "trainer generates", "commit": "commit", "switch": "switch", "score": "score"}
    seen = {event.what for run in runs for event in run.events}
    patches = [Patch(color=COLOURS[what], label=label) for what, label in names.items() if what in seen]
    patches += [
        Patch(color=COLOURS["generate"], label="generate"),
        Patch(color=NEXT_BATCH, label="generate, every other batch"),
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8)
    figure.suptitle(f"{profile.model}: {profile.setting}\nsimulated, not measured", fontsize=10)
    figure.savefig(path, dpi=130)


def _draw_run(axis: Axes, profile: Profile, run: Outcome, horizon_s: float) -> None:
    start_s = run.window_s[0]
    end_s = start_s + horizon_s
    if run.split is None:
        _draw_bars(axis, run.events, "all", 0.5, start_s, end_s)
        axis.set_yticks([0.5], ["all"])
    else:
        _draw_bars(axis, run.events, TRAINER, 1.0, start_s, end_s)
        num_groups, bottom = profile.numbers.num_prompts, -LANE_HEIGHT / 2
        of_batch: tuple[list[Event], list[Event]] = ([], [])
        for event in run.events:
            if event.what == "generate":
                of_batch[event.ids[0] // num_groups % 2].append(event)
        num_slots = run.split.generator.num_devices
        everything = busy_steps([*of_batch[0], *of_batch[1]], start_s, end_s, num_slots)
        for (times, shares), colour in (
            (everything, NEXT_BATCH),
            (busy_steps(of_batch[0], start_s, end_s, num_slots), COLOURS["generate"]),
        ):
            heights = [bottom + share * LANE_HEIGHT for share in shares]
            axis.fill_between(times, bottom, heights, step="post", color=colour, linewidth=0)
        axis.set_yticks([1.0, 0.0], ["trainer", "generator"])
    axis.set_ylim(-0.55, 1.55)
    axis.tick_params(left=False, labelsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    title = f"{run.name}   {run.devices}   {run.step_s:.1f} s/step   {run.samples_per_device_s:.3f} samples/s/device"
    axis.set_title(title, loc="left", fontsize=9, pad=2)


def _draw_bars(axis: Axes, events: Iterable[Event], who: str, centre: float, start_s: float, end_s: float) -> None:
    for event in events:
        if event.who == who and event.end_s > start_s and event.start_s < end_s:
            begin_s = max(event.start_s, start_s)
            axis.broken_barh(
                [(begin_s - start_s, min(event.end_s, end_s) - begin_s)],
                (centre - LANE_HEIGHT / 2, LANE_HEIGHT),
                facecolors=COLOURS[event.what],
                edgecolor="white",
                linewidth=0.3,
            )
