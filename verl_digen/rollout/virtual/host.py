# SPDX-License-Identifier: Apache-2.0
"""The one process of all virtual replicas: waits as long as the profile says, answers with trajectories of zeros.

- Shapes, dtypes, versions, seeds and windows are those a real replica would answer with; latents are views of one
  buffer that is made once, so the host's own memory does not grow with the batch.
- A pixel's value is a function of the sample's seed, so that rewards differ and a run can be repeated.
- It stands for the checkpoint engine's workers too: weights reach all virtual replicas at once, at no cost of their
  own, because the profile's `commit_s` is spent on the trainer.

Invariant (tests/bench/test_host.py): a sample comes out the same whichever replica is asked, and the samples of a
chunk end together.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from verl.utils.torch_dtypes import PrecisionType

from verl_digen.config import DigenConfig
from verl_digen.rollout.recording import initial_seed, record_trajectory, trained_latents
from verl_digen.rollout.virtual.durations import ReplicaClock, virtual_durations
from verl_digen.types import Generation, SampleRequest

NAME = "digen_virtual_host"
"""Ray actor name."""

MAX_CONCURRENCY = 10_000
"""Requests that wait in the host at once: every sample in flight is one."""

CONDITION_SHAPE = (64, 64)
"""[L, D] of a virtual prompt's embeddings."""


class VirtualHost:
    """An asyncio actor."""

    def __init__(self, digen: DigenConfig):
        self._digen = digen
        self._sample_s = virtual_durations(digen).sample_s
        self._clocks: dict[int, ReplicaClock] = {}
        self._version = 0
        self._dtype = PrecisionType.to_dtype(digen.rollout.latents_dtype)
        self._latents = torch.empty(0)
        self._condition = {"embeds": torch.zeros(CONDITION_SHAPE)}

    async def generate(self, replica_rank: int, request: SampleRequest) -> Generation:
        """One sample, when the batch that it joins on the replica is done."""
        started_s, version = time.time(), self._version
        if replica_rank not in self._clocks:
            self._clocks[replica_rank] = ReplicaClock(self._sample_s)
        batch = self._clocks[replica_rank].join(request.uid, time.monotonic())
        while (remaining_s := batch.ends_s - time.monotonic()) > 0:
            await asyncio.sleep(remaining_s)
        return self._answer(request, version, started_s)

    def _answer(self, request: SampleRequest, version: int, started_s: float) -> Generation:
        num_steps, recorded = request.sampling.num_steps, trained_latents(request.window)
        trajectory = record_trajectory(
            request,
            seed=initial_seed(self._digen.seed, request),
            versions=(version, self._version),
            path=dict.fromkeys(recorded, torch.empty(0)),
            sigmas=torch.linspace(1.0, 0.0, num_steps + 1),
            log_probs_T=torch.zeros(num_steps),
            empty=torch.empty(0),
        )
        geometry = request.sampling.geometry
        frames = (geometry.num_frames,) if geometry.num_frames > 1 else ()
        pixels = torch.zeros((*frames, geometry.height_px, geometry.width_px, 3), dtype=torch.uint8)
        pixels.view(-1)[0] = trajectory.seed % 256
        return Generation(
            trajectory=replace(trajectory, latents=self._zeros(len(recorded))),
            pixels=pixels,
            condition=self._condition if request.wants_condition else None,
            negative_condition=(
                self._condition if request.wants_condition and request.sampling.guidance_scale > 1.0 else None
            ),
            extra_fields={
                "global_steps": self._version,
                "generate_start_s": started_s,
                "generate_end_s": time.time(),
                "experts": (),
            },
        )

    def _zeros(self, num_latents: int) -> torch.Tensor:
        """[S, ...] of the shared buffer, which grows to the most ever asked for."""
        if len(self._latents) < num_latents:
            self._latents = torch.zeros((num_latents, *self._digen.virtual.latent_shape), dtype=self._dtype)
        return self._latents[:num_latents]

    async def check_health(self) -> dict[str, Any]:
        """As a real replica's, see `verl_digen.trainer.replicas.replica_metrics`; nothing is encoded or loaded here."""
        return {
            "version": self._version,
            "prompt_cache": {"hits": 0, "misses": 0, "size": 0, "max_size": 0},
            "last_update": {"update_s": 0.0, "load_s": 0.0, "drain_s": 0.0},
        }

    # -- as the worker of a checkpoint engine -------------------------------------------------------------
    async def update_weights(self, global_steps: int) -> None:
        """All replicas have version `global_steps` from now on."""
        self._version = global_steps

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
