# SPDX-License-Identifier: Apache-2.0
"""Seconds of the parts of a step, from the timeline, for `digen bench --profile` and `digen simulate --run`. Pure.

Chunks, fragments and calls count with their medians, so that a few slow ones change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from verl_digen.observe.timeline.interval import Interval, join_parts


@dataclass(frozen=True)
class StepParts:
    """Work of one step: (samples, seconds) of each call."""

    step_s: float
    """The step's own extent, without checkpoints."""
    commit_s: float
    """Optimizer step and publication together."""
    chunks: list[tuple[int, float]] = field(default_factory=list)
    assists: list[tuple[int, float]] = field(default_factory=list)
    fragments: list[tuple[int, float]] = field(default_factory=list)
    scores_s: list[float] = field(default_factory=list)


def step_parts(intervals: Iterable[Interval], step: int) -> StepParts | None:
    """Work that served `step`; None if it has no extent, chunk or fragment.

    Args:
        intervals: of this step, and of the one before, in which its first chunks may lie.
    """
    own = [interval for interval in join_parts(intervals) if interval.step == step]
    seconds = {kind: sum(part.duration_s for part in own if part.kind == kind) for kind in ("step", "save")}
    # replicas take weights on their own lanes, while others work: only the trainer's part holds up the step
    ends = [part for part in own if part.kind in ("commit", "publish") and part.lane.pool == "trainer"]
    parts = StepParts(
        seconds["step"] - seconds["save"],
        sum(part.duration_s for part in ends),
        chunks=_calls(own, "generate"),
        assists=_calls(own, "assist"),
        fragments=_calls(own, "train"),
        # from a chunk's pixels to its scores; a reward's own calls have lanes of their own, from 1 on
        scores_s=[part.duration_s for part in own if part.kind == "score" and part.lane.index == 0],
    )
    return parts if parts.step_s > 0 and parts.chunks and parts.fragments else None


def _calls(intervals: Iterable[Interval], kind: str) -> list[tuple[int, float]]:
    return [(part.num_samples, part.duration_s) for part in intervals if part.kind == kind and part.num_samples > 0]


def slot_sample_s(chunks: Iterable[tuple[int, float]]) -> float:
    """Seconds of a sample in a slot."""
    return median(seconds / number for number, seconds in chunks)


def rank_row_s(fragments: Iterable[tuple[int, float]], num_ranks: int, num_rows: int) -> float:
    """Seconds of a row on a rank; the fullest rank has a fragment's rows / ranks, rounded up.

    Args:
        num_rows: rows of a sample.
    """
    return median(seconds / -(-number * num_rows // num_ranks) for number, seconds in fragments)
