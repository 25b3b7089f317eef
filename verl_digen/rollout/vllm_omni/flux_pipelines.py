# SPDX-License-Identifier: Apache-2.0
"""Recording mixins of FLUX.1 Kontext and FLUX.2 [klein], whose networks read images as tokens behind the picture's.

vLLM-Omni's pipelines take one request at a time and encode its text and images themselves. A recorded batch runs as one
request of theirs, which makes text to image: it has the latents of all recordings as rows, `encode_prompt` returns the
conditions of all, distinguished by the marks `PROMPT` and `NEGATIVE`, and `predict_noise` puts the images' tokens and
places, both from the model file, behind the picture's. Requests of a batch have images of the same sizes
(`engine.BarrierRequestScheduler`).

Differences of vLLM-Omni's pipelines to diffusers', which this replaces: klein refuses an empty prompt, and reads the
text encoder's layers that the encoder's config names; Kontext ignores `output_type`; klein and Kontext read images at
about 1024 x 1024 px. A further one, klein's guidance of distilled checkpoints, is refused before Ray starts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from diffusers.pipelines.flux2 import pipeline_flux2_klein
from torch import Tensor, nn
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch, split_diffusion_output_by_request
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from verl_digen.models.base import Collated
from verl_digen.rollout.vllm_omni.edit_pipelines import EncodesImages
from verl_digen.rollout.vllm_omni.recorder import Recording
from verl_digen.rollout.vllm_omni.request_pipelines import FluxRecording, cast_encoders
from verl_digen.types import Condition, Geometry, Sampling

PROMPT, NEGATIVE = "prompt", ""
"""Texts that the pipelines are given; they encode the negative one, which is empty in klein's own code, second."""
DIFFUSERS_KLEIN: type[Any] = pipeline_flux2_klein.Flux2KleinPipeline


class ReadsSources(EncodesImages):
    """Mixin for a pipeline whose network reads "source" of a condition behind the picture's tokens."""

    supports_request_batch = True
    _collated: Collated | None = None
    """Conditions of the running recorded batch."""
    _source: Tensor | None = None
    """[B, tokens, C] images of the running recorded batch, the same in both branches of guidance; None without any."""

    # -- a batch as one request ---------------------------------------------------------------------------
    def forward_recorded(self, requests: list[OmniDiffusionRequest], **arguments: Any) -> list[DiffusionOutput]:
        assert self._schedule is not None
        recordings = self._schedule.recordings
        self._collated = self._model.collate([recording.condition for recording in recordings])
        self._source = self._model.source_of(self._collated, self._geometry)
        try:
            (output,) = super().forward_recorded([self._joined(requests)], **arguments)
        finally:
            self._collated = self._source = None
        return split_diffusion_output_by_request(output, DiffusionRequestBatch(requests), num_outputs_per_prompt=1)

    def _joined(self, requests: list[OmniDiffusionRequest]) -> OmniDiffusionRequest:
        """A request with the latents of all, [B, ...], and everything else of the first one."""
        joined = copy.copy(requests[0])
        joined.sampling_params = copy.copy(joined.sampling_params)
        latents = torch.cat([_latents(request) for request in requests])
        joined.sampling_params.latents = self.starting_latents(latents)
        return joined

    def starting_latents(self, latents: Tensor) -> Tensor:
        """Latents [B, tokens, C] in the form that the pipeline takes."""
        return latents

    # -- conditions ---------------------------------------------------------------------------------------
    def prompt_fields(self, recording: Recording) -> dict[str, Any]:
        fields: dict[str, Any] = {"prompt": PROMPT}
        return fields if recording.negative_condition is None else fields | {"negative_prompt": NEGATIVE}

    def _conditions_of_request(self, prompt: str, **arguments: Any) -> tuple[Any, ...]:
        """Conditions of the batch, through the pipeline's own way for embeddings that are given."""
        assert self._schedule is not None and self._collated is not None and prompt in (PROMPT, NEGATIVE)
        collated = self._collated
        if prompt == NEGATIVE:
            negatives: list[Condition] = []
            for recording in self._schedule.recordings:
                assert recording.negative_condition is not None
                negatives.append(recording.negative_condition)
            collated = self._model.collate(negatives)
        return self._pipelines_encode_prompt(prompt=None, **self.embeddings(collated))

    def embeddings(self, collated: Collated) -> dict[str, Tensor]:
        """Arguments of the pipeline's `encode_prompt` for conditions that are given."""
        return {"prompt_embeds": collated["embeds"]}

    # -- the network --------------------------------------------------------------------------------------
    def predict_noise(self, *, hidden_states: Tensor, img_ids: Tensor, **inputs: Any) -> Tensor:
        """Velocity of the picture's tokens; with the images' tokens behind them while recorded requests run."""
        predict: Callable[..., Tensor] = super().predict_noise
        if self._source is None:
            return predict(hidden_states=hidden_states, img_ids=img_ids, **inputs)
        ids = self._model.source_ids(self._geometry, img_ids.dtype).to(img_ids.device)  # [tokens, axes]
        ids = ids.expand(*img_ids.shape[:-2], *ids.shape)
        joined = torch.cat([hidden_states, self._source.to(hidden_states.dtype)], dim=1)
        velocity = predict(hidden_states=joined, img_ids=torch.cat([img_ids, ids], dim=-2), **inputs)
        return velocity[:, : hidden_states.shape[1]]

    @property
    def _geometry(self) -> Geometry:
        assert self._schedule is not None
        return self._schedule.recordings[0].request.sampling.geometry


class FluxKontextRecording(ReadsSources, FluxRecording):
    """FLUX.1 Kontext."""

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        super().__init__(od_config=od_config, prefix=prefix)
        self.set_progress_bar_config(disable=True)  # type: ignore[attr-defined]

    def forward_recorded(self, requests: list[OmniDiffusionRequest], **arguments: Any) -> list[DiffusionOutput]:
        output_type = requests[0].sampling_params.output_type or "pil"
        return super().forward_recorded(requests, output_type=output_type, **arguments)

    def _joined(self, requests: list[OmniDiffusionRequest]) -> OmniDiffusionRequest:
        joined = super()._joined(requests)
        params = joined.sampling_params
        params.extra_args = {**params.extra_args, "latents": params.latents}
        return joined

    def _encode_vae_image(self, image: Tensor, generator: Any) -> Tensor:
        """Encode in the VAE's dtype, which differs from the pipeline's own images in a warm-up."""
        latents = super()._encode_vae_image(image.to(self.vae.dtype), generator)  # type: ignore[misc]
        return latents.to(image.dtype)

    def set_guidance(self, params: OmniDiffusionSamplingParams, sampling: Sampling) -> None:
        super().set_guidance(params, sampling)
        params.guidance_scale_provided = True

    def embeddings(self, collated: Collated) -> dict[str, Tensor]:
        return {**super().embeddings(collated), "pooled_prompt_embeds": collated["pooled"]}


class Flux2KleinRecording(ReadsSources):
    """FLUX.2 [klein]. The pipeline's `guidance_scale` is our classifier-free guidance."""

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        cast_encoders(self)
        layers = signature(DIFFUSERS_KLEIN.encode_prompt).parameters["text_encoder_out_layers"].default
        self.text_encoder_out_layers = layers
        self.text_encoder.lm_head = nn.Identity()  # type: ignore[attr-defined] - of its outputs states are read alone

    def starting_latents(self, latents: Tensor) -> Tensor:
        return self._model.pipeline_start(latents, self._geometry)


def _latents(request: OmniDiffusionRequest) -> Tensor:
    latents = request.sampling_params.latents
    assert latents is not None, "`RequestRecordingMixin` hands them over"
    return latents
