# SPDX-License-Identifier: Apache-2.0
"""Samples that are pictures of the data set (`SampleRequest.picture`): a `diffusers` replica encodes them.

    file -> the run's size (`fitted`) -> VAE (mode of its posterior) -> clean latents, with the noise levels of a sample

Invariants (tests/rollout/test_pictures.py): latents are a function of the picture and the size, in batches of any size,
up to float error; a picture or a prompt that cannot be read fails its own sample alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from verl_digen.models.loaded import Decoder
from verl_digen.models.pixels import fitted
from verl_digen.rollout.prompt_cache import Prompts, carried, conditions_by_place
from verl_digen.sampling.recording import initial_seed, not_finite, record_trajectory, with_experts
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import Condition, Generation, SampleRequest


class PictureSamples:
    """Maker of these samples.

    Args:
        sampler: the replica's; records are in its dtype. prompts: conditions of the prompts. vae: the replica's.
        batch_size: maximum pictures in the VAE at a time.
    """

    def __init__(self, sampler: Sampler, prompts: Prompts, vae: Decoder, batch_size: int):
        self._model, self._prompts, self._vae = sampler.model, prompts, vae
        self._run_seed, self._latents_dtype, self._batch_size = sampler.run_seed, sampler.latents_dtype, batch_size

    def make(self, requests: Sequence[SampleRequest], version: int) -> list[Generation | ValueError]:
        """Samples in the order of `requests`, which share their `Sampling`; the error of a request that failed alone.

        Args:
            version: weight version of the replica.
        """
        started_s = time.time()
        conditions, failed = conditions_by_place(self._prompts, requests)
        pixels: dict[int, Tensor] = {}
        for place in conditions:
            request = requests[place]
            assert request.picture is not None  # the batch is of pictures
            try:
                pixels[place] = fitted(request.picture.read(), request.sampling.geometry)
            except ValueError as error:
                failed[place] = error
        answers: dict[int, Generation | ValueError] = {**failed}
        for place, latents in zip(pixels, self._encode([*pixels.values()]) if pixels else (), strict=True):
            request = requests[place]
            error = not_finite(request, latents, version, torch.tensor(True), None)
            answers[place] = error or self._answer(
                request, pixels[place], conditions[place], latents, version, started_s
            )
        return [answers[place] for place in range(len(requests))]

    def _encode(self, pixels: Sequence[Tensor]) -> Tensor:
        """[B, ...] in `latents_dtype`, on the CPU."""
        parts = torch.stack(list(pixels)).split(self._batch_size)
        return torch.cat([self._vae.encode(part).to("cpu", self._latents_dtype) for part in parts])

    def _answer(
        self,
        request: SampleRequest,
        pixels: Tensor,
        conditions: Sequence[Condition],
        latents: Tensor,
        version: int,
        started_s: float,
    ) -> Generation:
        sampling = request.sampling
        trajectory = record_trajectory(
            request,
            seed=initial_seed(self._run_seed, request),
            versions=(version, version),
            path={},
            final=latents,
            sigmas=self._model.sigmas(sampling.num_steps, sampling.geometry),
            log_probs_T=torch.zeros(sampling.num_steps),
        )
        return Generation(
            trajectory=with_experts(self._model, trajectory),
            pixels=pixels,
            started_s=started_s,
            ended_s=time.time(),
            **carried(request, conditions),
        )
