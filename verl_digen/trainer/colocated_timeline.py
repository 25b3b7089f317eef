# SPDX-License-Identifier: Apache-2.0
"""The timeline of a run whose replicas and rewards take turns on the trainer's devices, `RUN_DIR/timeline.jsonl`.

| lane | intervals |
| --- | --- |
| `driver/0` | `step` |
| `generator/0` | `generate`, one per group, from its first sample's start to its last one's end |
| `reward/0` | `score`, one per group, for rewards without processes of their own |
| `reward/N` | `wake`, `score`, `sleep` of one reward each, from 1 on |
| `trainer/0` | the devices: `generate` (samples without a gap between them), `train`, `publish`, `save`, `validate` |

The devices work in turn, so their lane is at work while they generate, and the lanes of generator and rewards, which
say for whom, stand for no devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_digen.observe.timeline import Interval, Kind, Lane, TimelineFile
from verl_digen.observe.timeline.file import NAME
from verl_digen.trainer.lanes import call_intervals
from verl_digen.trainer.turns import RewardTurn
from verl_digen.types import SampleTag

Span = tuple[float, float]
"""(start, end) in unix seconds."""


class ColocatedTimeline:
    """See the module.

    Args:
        names: rewards with processes of their own, in order.
        num_devices: devices that trainer, replicas and rewards share.
        after: the step after which the run resumes; 0 for a new one.
        host: name of their node, or nodes.
    """

    def __init__(self, run_dir: Path, names: Sequence[str], *, num_devices: int, after: int, host: str):
        self._names, self._host = list(names), host
        self._devices = Lane("trainer", 0, self._host, num_devices)
        self._file = TimelineFile(run_dir / NAME, {"trainer": num_devices})
        self._file.keep_until(after)
        self._work: list[tuple[Kind, Span]] = []
        """Work of the devices that no step was written with yet."""

    @contextmanager
    def working(self, kind: Kind) -> Iterator[None]:
        """Record that the devices do this, also if it fails."""
        began_s = time.time()
        try:
            yield
        finally:
            self._work.append((kind, (began_s, max(began_s, time.time()))))

    def write(self, step: int, samples: Mapping[str, SampleTag], turns: Sequence[RewardTurn], *, extent: Span) -> None:
        """Append a step, with the work since the last one was written.

        Args:
            samples: key -> tag of what it trained.
            turns: changes since the last step was written; validations in between have theirs.
        """
        groups: dict[str, list[SampleTag]] = {}
        for tag in samples.values():
            groups.setdefault(tag.facts.uid, []).append(tag)
        generated = [self._generated(step, uid, tags) for uid, tags in groups.items()]
        changed = [self._changed(turn, step) for turn in turns]
        scored = [*self._scored(step, groups), *call_intervals(samples.values(), self._names, self._host, step=step)]
        frame = Interval("step", Lane("driver", 0, self._host, 0), step, *extent)
        work = [self._worked(kind, span, step, groups, len(samples)) for kind, span in self._work]
        self._work = []
        self._file.append([*generated, *self._on_devices(generated, step), *changed, *scored, *work, frame])

    def _generated(self, step: int, uid: str, tags: Sequence[SampleTag]) -> Interval:
        return Interval(
            "generate",
            Lane("generator", 0, self._host, 0),
            step,
            min(tag.generated[0] for tag in tags),
            max(tag.generated[1] for tag in tags),
            version=tags[0].facts.version,
            chunk_id=uid,
            group_ids=(uid,),
            num_samples=len(tags),
        )

    def _on_devices(self, generated: Sequence[Interval], step: int) -> Iterator[Interval]:
        """Merge what overlaps: groups that take the place of failed ones are generated after a turn of the rewards."""
        spans: list[list[Interval]] = []
        end_s = -math.inf
        for one in sorted(generated, key=lambda one: one.start_s):
            if one.start_s > end_s:
                spans.append([])
            spans[-1].append(one)
            end_s = max(end_s, one.end_s)
        for number, together in enumerate(spans):
            yield Interval(
                "generate",
                self._devices,
                step,
                together[0].start_s,
                max(one.end_s for one in together),
                version=together[0].version,
                chunk_id=f"step-{step}" if number == 0 else f"step-{step}-{number}",
                num_samples=sum(one.num_samples for one in together),
            )

    def _scored(self, step: int, groups: Mapping[str, Sequence[SampleTag]]) -> Iterator[Interval]:
        """Scoring by rewards that run where the samples are collected."""
        for uid, tags in groups.items():
            if any(call.reward in self._names for tag in tags for call in tag.calls):
                continue
            start_s, end_s = min(tag.scored[0] for tag in tags), max(tag.scored[1] for tag in tags)
            lane = Lane("reward", 0, self._host, 0)
            yield Interval("score", lane, step, start_s, end_s, group_ids=(uid,), num_samples=len(tags))

    def _worked(
        self, kind: Kind, span: Span, step: int, groups: Mapping[str, Sequence[SampleTag]], num_samples: int
    ) -> Interval:
        facts: dict[Kind, dict[str, Any]] = {
            "publish": {"version": step},
            "train": {"fragment_id": f"step-{step}", "group_ids": tuple(groups), "num_samples": num_samples},
        }
        return Interval(kind, self._devices, step, *span, **facts.get(kind, {}))

    def _changed(self, turn: RewardTurn, step: int) -> Interval:
        lane = Lane("reward", 1 + self._names.index(turn.reward), self._host, 0)
        start_s, end_s = turn.turn.start_s, max(turn.turn.start_s, turn.turn.end_s)
        detail = {"reward": turn.reward, "process": turn.number, "held_bytes": turn.turn.held_bytes}
        return Interval(turn.change, lane, step, start_s, end_s, detail=detail)
