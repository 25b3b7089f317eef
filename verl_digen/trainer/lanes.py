# SPDX-License-Identifier: Apache-2.0
"""The timeline lanes of separate pools, and what idle lanes wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_digen.observe.timeline import Lane, Recorder, WaitReason
from verl_digen.observe.timeline.recorder import OpenInterval


@dataclass(frozen=True)
class Lanes:
    """The timeline lanes that the conductor writes to."""

    trainer: Lane
    reward: Lane
    slots: Mapping[str, Lane]
    """Slot -> lane of its replica."""


@dataclass(frozen=True)
class Joining:
    """A replica with the newest weights and no slot yet."""

    replica: str
    lane: Lane
    slots: Sequence[str]
    """New names, never used by a slot before."""


class IdleLanes:
    """Records the waits of idle lanes."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._waiting: dict[Lane, OpenInterval] = {}

    def wait(self, lane: Lane, reason: WaitReason, step: int) -> None:
        """Record that a lane is idle from now on, in `step`."""
        opened = self._waiting.get(lane)
        if opened is not None and opened.work.get("reason") == reason and opened.step == step:
            return
        self.stop(lane)
        self._waiting[lane] = self._recorder.begin("wait", lane, step=step, reason=reason)

    def stop(self, lane: Lane) -> None:
        """Record that a lane has work again, if it waited."""
        if lane in self._waiting:
            self._recorder.end(self._waiting.pop(lane))
