# SPDX-License-Identifier: Apache-2.0
"""Samples without a model: real shapes, dtypes, versions, seeds and windows, with zeros as data.

- Latents are views of one shared buffer, so a process's own memory does not grow with the batch.
- A pixel's value is a function of the sample's seed, so that rewards differ and a run is reproducible.
"""

import time
from dataclasses import replace

import torch
from verl.utils.torch_dtypes import PrecisionType

from verl_digen.config import DigenConfig
from verl_digen.sampling.recording import initial_seed, record_trajectory, trained_latents
from verl_digen.types import CleanRecord, Condition, Generation, PathRecord, SampleRequest

CONDITION_SHAPE = (64, 64)
"""[L, D] of a prompt's embeddings."""
LATENT_SHAPE = (16, 8, 8)
"""[C, H, W] of a recorded latent."""


class BlankSamples:
    """Factory of such samples; replicas and trainer make the same one for the same request."""

    def __init__(self, digen: DigenConfig):
        self._digen = digen
        self._dtype = PrecisionType.to_dtype(digen.rollout.latents_dtype)
        self._latents = torch.empty(0)
        self._condition = {"embeds": torch.zeros(CONDITION_SHAPE)}

    def conditions(self, request: SampleRequest) -> tuple[Condition, Condition | None]:
        """Conditions of the request's prompt and, where guidance reads it, of its negative prompt."""
        return self._condition, self._condition if len(request.branches) > 1 else None

    def make(
        self, request: SampleRequest, versions: tuple[int, int], started_s: float, ended_s: float | None = None
    ) -> Generation:
        """The sample, generated from `started_s` to `ended_s` (unix time; None: now).

        Args:
            versions: weight versions of its first and last step.
        """
        num_steps, nothing = request.sampling.num_steps, torch.empty(0)
        trajectory = record_trajectory(
            request,
            seed=initial_seed(self._digen.seed, request),
            versions=versions,
            path=dict.fromkeys(trained_latents(request.window), nothing),
            final=nothing,
            sigmas=torch.linspace(1.0, 0.0, num_steps + 1),
            log_probs_T=torch.zeros(num_steps),
        )
        geometry = request.sampling.geometry
        frames = (geometry.num_frames,) if geometry.num_frames > 1 else ()
        pixels = torch.zeros((*frames, geometry.height_px, geometry.width_px, 3), dtype=torch.uint8)
        pixels.view(-1)[0] = trajectory.facts.seed % 256
        condition, negative_condition = self.conditions(request) if request.wants_condition else (None, None)
        return Generation(
            trajectory=replace(trajectory, record=self._with_latents(trajectory.record)),
            pixels=pixels,
            started_s=started_s,
            ended_s=time.time() if ended_s is None else ended_s,
            condition=condition,
            negative_condition=negative_condition,
        )

    def _with_latents(self, record: PathRecord | CleanRecord) -> PathRecord | CleanRecord:
        """The record, with views of the shared buffer as latents."""
        if isinstance(record, PathRecord):
            return replace(record, latents=self._zeros(len(record.latents)))
        return replace(record, clean=self._zeros(1)[0])

    def _zeros(self, num_latents: int) -> torch.Tensor:
        """[S, ...] view of the shared buffer, which grows to the largest size requested."""
        if len(self._latents) < num_latents:
            self._latents = torch.zeros((num_latents, *LATENT_SHAPE), dtype=self._dtype)
        return self._latents[:num_latents]
