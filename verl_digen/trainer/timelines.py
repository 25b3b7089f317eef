# SPDX-License-Identifier: Apache-2.0
"""Lanes of the timeline on separate pools: what idle ones wait for, and their nodes; and `ColocatedTimeline`."""

import logging
import math
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from verl_digen.observe.timeline.file import NAME, TimelineFile
from verl_digen.observe.timeline.interval import Interval, Kind, Lane
from verl_digen.observe.timeline.recorder import OpenInterval, Recorder
from verl_digen.schedulers.types import WaitReason
from verl_digen.trainer.turns import RewardTurn
from verl_digen.types import RewardCall, SampleTag

logger = logging.getLogger(__name__)


def joined_name(hosts: Sequence[str]) -> str:
    """One name for a lane on several nodes: `node-1`, or `node-1 and 3 more`."""
    distinct = sorted(set(hosts))
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]} and {len(distinct) - 1} more"


def hosts_of(who: str, actors: Sequence[Any], answer_s: float) -> str:
    """Name for the lane of these Ray actors; this node's if they do not answer within `answer_s`."""
    try:
        asked = [actor.__ray_call__.remote(lambda _: socket.gethostname()) for actor in actors]
        return joined_name(ray.get(asked, timeout=answer_s))
    except RayError as error:
        logger.warning("%s do not say which node they are on (%s); the timeline shows this one", who, error)
        return socket.gethostname()


@dataclass(frozen=True)
class Joining:
    """A replica with the newest weights and no slot yet."""

    replica: str
    """Its address."""
    server: Any
    """Handle of its server."""
    lane: Lane
    slots: Sequence[str]
    """New names of slots, places where it works on one chunk at a time; never used before."""


def call_intervals(tags: Iterable[SampleTag], names: Sequence[str], host: str, *, step: int) -> list[Interval]:
    """The calls of rewards that scored samples of a step, each once: samples of one call share it. Rewards in `names`
    have processes of their own, and each a lane without devices on `host`, from `reward/1` on."""
    groups: dict[RewardCall, dict[str, None]] = {}
    for tag in tags:
        for call in tag.calls:
            if call.reward in names:
                groups.setdefault(call, {})[tag.facts.uid] = None
    return [
        Interval(
            "score",
            Lane("reward", 1 + names.index(call.reward), host, 0),
            step,
            call.start_s,
            max(call.start_s, call.end_s),
            group_ids=tuple(uids),
            num_samples=call.num_samples,
            detail={"reward": call.reward, "num_queued": call.num_queued},
        )
        for call, uids in groups.items()
    ]


class IdleLanes:
    """Records the waits of idle lanes."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._waiting: dict[Lane, OpenInterval] = {}

    def wait(self, lane: Lane, reason: WaitReason, step: int) -> None:
        """Record that a lane is idle from now on, in `step`."""
        opened = self._waiting.get(lane)
        if opened is not None and (opened.begun.reason, opened.begun.step) == (reason, step):
            return
        self.stop(lane)
        self._waiting[lane] = self._recorder.begin("wait", lane, step=step, reason=reason)

    def stop(self, lane: Lane) -> None:
        """Record that a lane has work again, if it waited."""
        if lane in self._waiting:
            self._recorder.end(self._waiting.pop(lane))


Span = tuple[float, float]
"""(start, end) in unix seconds; the end is before the start where the clock was set back meanwhile."""


def _extent(spans: Iterable[Span]) -> Span:
    """From the first start to the last end, or to the last start if that is later."""
    starts, ends = zip(*spans, strict=True)
    return min(starts), max(*starts, *ends)


class ColocatedTimeline:
    """Timeline of a run whose replicas and rewards take turns on the trainer's devices, `RUN_DIR/timeline.jsonl`:

    | lane | intervals |
    | --- | --- |
    | `driver/0` | `step` |
    | `generator/0` | `generate`, one per group, from its first sample's start to its last one's end |
    | `reward/0` | `score`, one per group, for rewards without processes of their own |
    | `reward/N` | `wake`, `score`, `sleep` of one reward each, from 1 on |
    | `trainer/0` | the devices: `generate` (samples without a gap), `train`, `publish`, `save`, `validate` |

    The devices work in turn, so their lane is at work while they generate, and the lanes of generator and rewards,
    which say for whom, stand for no devices. `names`: rewards with processes of their own; `after`: the step after
    which the run resumes, 0 for a new one.
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
        """Append a step that trained `samples` (key -> tag), with the work and the turns since the last one was
        written; validations in between have theirs."""
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
            *_extent(tag.generated for tag in tags),
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
            extent = _extent(tag.scored for tag in tags)
            lane = Lane("reward", 0, self._host, 0)
            yield Interval("score", lane, step, *extent, group_ids=(uid,), num_samples=len(tags))

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
