# SPDX-License-Identifier: Apache-2.0
"""The one process of all virtual replicas: waits as long as the profile says, answers with trajectories of zeros.

- What it answers is made by `verl_digen.virtual.samples`.
- It stands for the checkpoint engine's workers too: weights reach all virtual replicas at once, at no cost of their
  own, because the profile's `commit_s` is spent on the trainer.

Invariant (tests/bench/test_host.py): the samples of a chunk end together.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from contextlib import suppress
from functools import partial
from typing import Any

from verl_digen.config import DigenConfig
from verl_digen.rollout.batcher import Withdrawn
from verl_digen.types import Condition, Generation, SampleRequest
from verl_digen.virtual.durations import ReplicaClock, virtual_durations
from verl_digen.virtual.samples import VirtualSamples

NAME = "digen_virtual_host"
"""Ray actor name."""

MAX_CONCURRENCY = 10_000
"""Requests that wait in the host at once: every sample in flight is one."""


class VirtualHost:
    """An asyncio actor."""

    def __init__(self, digen: DigenConfig):
        self._sample_s = virtual_durations(digen).sample_s
        self._clocks: dict[int, ReplicaClock] = {}
        self._samples = VirtualSamples(digen)
        self._newest = 0
        """Version that was published."""
        self._versions: defaultdict[int, int] = defaultdict(int)
        """Replica -> version it has."""

    async def generate(self, replica_rank: int, request: SampleRequest) -> Generation:
        """One sample, when the batch that it joins on the replica is done; `Withdrawn` if nobody wants it any more."""
        started_s, version = time.time(), self._versions[replica_rank]
        if replica_rank not in self._clocks:
            self._clocks[replica_rank] = ReplicaClock(self._sample_s)
        batch = self._clocks[replica_rank].join(request.uid, time.monotonic())
        while (remaining_s := batch.ends_s - time.monotonic()) > 0:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(batch.is_stopped.wait(), remaining_s)
        if batch.is_stopped.is_set():
            raise Withdrawn(f"sample {request.uid}_{request.sample_index} is not wanted any more")
        return self._samples.make(request, (version, self._versions[replica_rank]), started_s)

    async def encode(self, request: SampleRequest) -> tuple[Condition, Condition | None]:
        """The conditions of the request's prompts, at once."""
        return self._samples.conditions(request)

    async def withdraw(self, replica_rank: int, uid: str) -> None:
        """Nobody wants the group's samples any more; if the replica is busy with them, it is free now."""
        if replica_rank in self._clocks:
            self._clocks[replica_rank].stop(uid, time.monotonic())

    async def activate_weights(self, replica_rank: int) -> int:
        """The replica takes the newest version -> which it is."""
        self._versions[replica_rank] = self._newest
        return self._newest

    async def check_health(self) -> dict[str, Any]:
        """As a real replica's, see `verl_digen.trainer.replicas.replica_metrics`; nothing is encoded or loaded here."""
        return {
            "version": self._newest,
            "received_version": self._newest,
            "prompt_cache": {"hits": 0, "misses": 0, "size": 0, "max_size": 0},
            "last_update": {"update_s": 0.0, "load_s": 0.0, "drain_s": 0.0},
            "probes": (),  # there is no network
            "device": None,
        }

    # -- as the worker of a checkpoint engine -------------------------------------------------------------
    async def update_weights(self, global_steps: int) -> None:
        """All replicas may take version `global_steps` from now on."""
        self._newest = global_steps

    async def execute_checkpoint_engine(self, method: str, **unused: Any) -> None:
        """There is nobody to meet: no bytes travel."""


class VirtualServer:
    """What callers take for the Ray handle of a replica's server: a replica's number in front of the host's handle."""

    def __init__(self, host: Any, replica_rank: int):
        self.host = host
        self.replica_rank = replica_rank

    @property
    def generate(self) -> RemoteMethod:
        """`generate.remote(request_id, prompt_ids, sampling_params)`, as of any server."""
        return RemoteMethod(partial(_generate, self.host, self.replica_rank))

    @property
    def encode(self) -> Any:
        """What the host says."""
        return self.host.encode

    @property
    def activate_weights(self) -> RemoteMethod:
        """`activate_weights.remote()`, as of any server."""
        return RemoteMethod(partial(_activate, self.host, self.replica_rank))

    @property
    def abort_request(self) -> RemoteMethod:
        """`abort_request.remote(request_id)`, as of any server."""
        return RemoteMethod(partial(_abort, self.host, self.replica_rank))

    @property
    def check_health(self) -> Any:
        """What the host says."""
        return self.host.check_health

    @property
    def __ray_ready__(self) -> Any:
        """Answers while the host lives."""
        return self.host.__ray_ready__


class RemoteMethod:
    """Something with a `remote`."""

    def __init__(self, remote: partial[Any]):
        self.remote = remote


def _generate(
    host: Any, replica_rank: int, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
) -> Any:
    return host.generate.remote(replica_rank, sampling_params["request"])


def _activate(host: Any, replica_rank: int) -> Any:
    return host.activate_weights.remote(replica_rank)


def _abort(host: Any, replica_rank: int, request_id: str) -> Any:
    return host.withdraw.remote(replica_rank, request_id.rpartition("_")[0])
