# SPDX-License-Identifier: Apache-2.0
"""The timeline of a run whose replicas and rewards take turns on the trainer's devices, `RUN_DIR/timeline.jsonl`.

| lane | intervals |
| --- | --- |
| `driver/0` | `step` |
| `generator/0` | `generate`, one per group, from its first sample's start to its last one's end |
| `reward/N` | `wake`, `score`, `sleep` of one reward each, from 1 on |
| `trainer/0` | `train`, all groups at once; stands for all devices |
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_digen.observe.timeline import Interval, Lane, TimelineFile
from verl_digen.observe.timeline.file import NAME
from verl_digen.store.keys import parse_key
from verl_digen.trainer.lanes import call_intervals
from verl_digen.trainer.turns import RewardTurn
from verl_digen.types import SampleTag

Span = tuple[float, float]
"""(start, end) in unix seconds."""


class TurnTimeline:
    """See the module.

    Args:
        names: rewards with processes of their own, in order.
        num_devices: devices that trainer, replicas and rewards share.
        after: the step after which the run resumes; 0 for a new one.
    """

    def __init__(self, run_dir: Path, names: Sequence[str], *, num_devices: int, after: int):
        self._names, self._host = list(names), socket.gethostname()
        self._trainer = Lane("trainer", 0, self._host, num_devices)
        self._file = TimelineFile(run_dir / NAME, {"trainer": num_devices})
        self._file.keep_until(after)

    def write(
        self, step: int, samples: Mapping[str, SampleTag], turns: Sequence[RewardTurn], *, extent: Span, training: Span
    ) -> None:
        """Append a step.

        Args:
            samples: key -> tag of what it trained.
            turns: changes since the last step was written; validations in between have theirs.
        """
        groups: dict[str, list[SampleTag]] = {}
        for key, tag in samples.items():
            groups.setdefault(parse_key(key).uid, []).append(tag)
        replicas = Lane("generator", 0, self._host, 0)
        generated = [
            Interval(
                "generate",
                replicas,
                step,
                min(tag.generated[0] for tag in tags),
                max(tag.generated[1] for tag in tags),
                version=tags[0].version,
                chunk_id=uid,
                group_ids=(uid,),
                num_samples=len(tags),
            )
            for uid, tags in groups.items()
        ]
        train = Interval(
            "train",
            self._trainer,
            step,
            *training,
            fragment_id=f"step-{step}",
            group_ids=tuple(groups),
            num_samples=len(samples),
        )
        scored = call_intervals(samples, self._names, self._host, step=step)
        changed = [self._changed(turn, step) for turn in turns]
        frame = Interval("step", Lane("driver", 0, self._host, 0), step, *extent)
        self._file.append([*generated, *changed, *scored, train, frame])

    def _changed(self, turn: RewardTurn, step: int) -> Interval:
        lane = Lane("reward", 1 + self._names.index(turn.reward), self._host, 0)
        start_s, end_s = turn.turn.start_s, max(turn.turn.start_s, turn.turn.end_s)
        detail = {"reward": turn.reward, "process": turn.number, "held_bytes": turn.turn.held_bytes}
        return Interval(turn.change, lane, step, start_s, end_s, detail=detail)
