# SPDX-License-Identifier: Apache-2.0
"""The timeline lanes of separate pools, what idle lanes wait for, and names of the nodes that lanes are on."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from verl_digen.observe.timeline import Interval, Lane, Recorder, WaitReason
from verl_digen.observe.timeline.recorder import OpenInterval
from verl_digen.types import RewardCall, SampleTag

logger = logging.getLogger(__name__)


def host_names() -> dict[str, str]:
    """Address -> name of every node that lives."""
    return {node["NodeManagerAddress"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}


def host_of(server_address: str, names: Mapping[str, str], driver: str) -> str:
    """Name of the node of a server.

    Args:
        server_address: IP:PORT, with an IPv6 address in brackets.
        names: address -> name.
        driver: name of this node, which a server on the loopback address is on.
    """
    address = server_address.rpartition(":")[0].strip("[]")
    if address in names:
        return names[address]
    return driver if address in ("127.0.0.1", "::1", "localhost", "") else address


def joined_name(hosts: Sequence[str]) -> str:
    """One name for a lane on several nodes: `node-1`, or `node-1 and 3 more`."""
    distinct = sorted(set(hosts))
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]} and {len(distinct) - 1} more"


def hosts_of(workers: Sequence[Any], answer_s: float) -> str:
    """Name for the lane of these Ray actors; this node's if they do not answer within `answer_s`."""
    try:
        asked = [worker.__ray_call__.remote(lambda _: socket.gethostname()) for worker in workers]
        return joined_name(ray.get(asked, timeout=answer_s))
    except RayError as error:
        logger.warning("the trainer's ranks do not say which node they are on (%s); the timeline shows this one", error)
        return socket.gethostname()


@dataclass(frozen=True)
class Lanes:
    """The timeline lanes that the conductor writes to, beside the replicas'."""

    trainer: Lane
    reward: Lane


@dataclass(frozen=True)
class Joining:
    """A replica with the newest weights and no slot yet."""

    replica: str
    lane: Lane
    slots: Sequence[str]
    """New names, never used by a slot before."""


def call_intervals(tags: Iterable[SampleTag], names: Sequence[str], host: str, *, step: int) -> list[Interval]:
    """The calls of rewards that scored samples of a step, each once: samples of one call share it.

    Args:
        names: rewards with processes of their own; each has a lane without devices, from `reward/1` on.
        host: where the lanes are drawn.
    """
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
