# SPDX-License-Identifier: Apache-2.0
"""The timeline: where every device-second of a run went. None of these modules imports numpy, Ray or torch.

Metrics, trace and the report's timeline are pure functions of its intervals, in a live run and afterwards alike:

    Recorder --drain--> TimelineFile --> read_timeline
                |                             |
           step_metrics            step_metrics, to_trace
"""

from verl_digen.observe.timeline.analysis import step_metrics
from verl_digen.observe.timeline.file import TimelineFile, read_timeline
from verl_digen.observe.timeline.interval import Interval, Kind, Lane
from verl_digen.observe.timeline.recorder import Recorder, UnixClock
from verl_digen.schedulers.types import WaitReason

__all__ = [
    "Interval",
    "Kind",
    "Lane",
    "Recorder",
    "TimelineFile",
    "UnixClock",
    "WaitReason",
    "read_timeline",
    "step_metrics",
]
