# SPDX-License-Identifier: Apache-2.0
"""The single process of all virtual replicas: waits for the profile's durations, answers with trajectories of zeros.

- The answers are made by `verl_digen.virtual.samples`.
- It replaces the checkpoint engine's workers too: weights reach all virtual replicas at once, at no extra cost, because
  the trainer spends the profile's `commit_s`.

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
"""Maximum number of requests waiting in the host: one per sample in flight."""


class VirtualHost:
    """Asyncio actor; see the module."""

    def __init__(self, digen: DigenConfig):
        self._sample_s = virtual_durations(digen).sample_s
        self._clocks: dict[int, ReplicaClock] = {}
        self._samples = VirtualSamples(digen)
        self._newest = 0
        """Newest published version."""
        self._versions: defaultdict[int, int] = defaultdict(int)
        """Replica -> version it generates with."""

    async def generate(self, replica_rank: int, request: SampleRequest) -> Generation:
        """Generate one sample; returns when its batch on the replica is done, raises `Withdrawn` if it is cancelled."""
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
        """Conditions of the request's prompts; takes no time."""
        return self._samples.conditions(request)

    async def withdraw(self, replica_rank: int, uid: str) -> None:
        """Cancel the group's samples on the replica; if it is busy with them, it is free now."""
        if replica_rank in self._clocks:
            self._clocks[replica_rank].stop(uid, time.monotonic())

    async def activate_weights(self, replica_rank: int) -> int:
        """Switch the replica to the newest version -> that version."""
        self._versions[replica_rank] = self._newest
        return self._newest

    async def check_health(self) -> dict[str, Any]:
        """State in a real replica's format, see `verl_digen.trainer.replicas.Replicas.metrics`. Nothing is encoded or
        loaded here."""
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
        """Make version `global_steps` available to all replicas."""
        self._newest = global_steps

    async def execute_checkpoint_engine(self, method: str, **unused: Any) -> None:
        """No-op: there is no group to join, and no bytes are sent."""


class VirtualServer:
    """Stand-in for the Ray handle of a replica's server: adds the replica's rank to calls on the host's handle."""

    def __init__(self, host: Any, replica_rank: int):
        self.host = host
        self.replica_rank = replica_rank

    @property
    def generate(self) -> RemoteMethod:
        """`generate.remote(request_id, prompt_ids, sampling_params)`, like any server's."""
        return RemoteMethod(partial(_generate, self.host, self.replica_rank))

    @property
    def encode(self) -> Any:
        """The host's method."""
        return self.host.encode

    @property
    def activate_weights(self) -> RemoteMethod:
        """`activate_weights.remote()`, like any server's."""
        return RemoteMethod(partial(_activate, self.host, self.replica_rank))

    @property
    def abort_request(self) -> RemoteMethod:
        """`abort_request.remote(request_id)`, like any server's."""
        return RemoteMethod(partial(_abort, self.host, self.replica_rank))

    @property
    def check_health(self) -> Any:
        """The host's method."""
        return self.host.check_health

    @property
    def __ray_ready__(self) -> Any:
        """The host's method: answers while the host is alive."""
        return self.host.__ray_ready__


class RemoteMethod:
    """Callable in the form of a Ray actor's method, with `remote`."""

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
