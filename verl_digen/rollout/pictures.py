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
from verl_digen.rollout.prompt_cache import Prompts
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
        known = self._prompts.lookup([inputs for request in requests for inputs in request.branches])
        read = [self._read(request, [known[inputs] for inputs in request.branches]) for request in requests]
        pixels = [found for found in read if isinstance(found, Tensor)]
        latents = iter(self._encode(pixels) if pixels else ())
        answers: list[Generation | ValueError] = []
        for request, found in zip(requests, read, strict=True):
            if isinstance(found, ValueError):
                answers.append(found)
                continue
            conditions = [known[inputs] for inputs in request.branches] if request.wants_condition else []
            final = next(latents)
            error = not_finite(request, final, version, torch.tensor(True), None)
            answers.append(error or self._answer(request, found, final, conditions, version, started_s))
        return answers

    def _read(self, request: SampleRequest, conditions: Sequence[Condition | ValueError]) -> Tensor | ValueError:
        """uint8 [H, W, 3] of the run's size; the error of the prompt or of the picture."""
        refused = [condition for condition in conditions if isinstance(condition, ValueError)]
        if refused:
            return refused[0]
        assert request.picture is not None  # the batch is of pictures
        try:
            return fitted(request.picture.read(), request.sampling.geometry)
        except ValueError as error:
            return error

    def _encode(self, pixels: Sequence[Tensor]) -> Tensor:
        """[B, ...] in `latents_dtype`, on the CPU."""
        parts = torch.stack(list(pixels)).split(self._batch_size)
        return torch.cat([self._vae.encode(part).to("cpu", self._latents_dtype) for part in parts])

    def _answer(
        self,
        request: SampleRequest,
        pixels: Tensor,
        latents: Tensor,
        conditions: Sequence[Condition | ValueError],
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
        carried = [each for each in conditions if not isinstance(each, ValueError)]
        return Generation(
            trajectory=with_experts(self._model, trajectory),
            pixels=pixels,
            started_s=started_s,
            ended_s=time.time(),
            condition=carried[0] if carried else None,
            negative_condition=carried[1] if len(carried) > 1 else None,
        )
