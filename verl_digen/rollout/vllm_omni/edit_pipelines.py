# SPDX-License-Identifier: Apache-2.0
"""Recording mixins of pipelines whose prompts have images: Qwen-Image-Edit, Qwen-Image-Edit-Plus, FLUX.1 Kontext and
FLUX.2 [klein].

An image travels as its reference in the request (`PromptInputs.images`) and is read where it is encoded, in the
engine's process. vLLM-Omni's own pre-processing, which has one size for all images, is skipped for a request with an
order (`engine.VersionedEngine`). Images are prepared and encoded by the model file, with the pipeline's encoder and
VAE, so that the condition is that of a `diffusers` replica. vLLM-Omni's prompt cache takes no images as keys: the
fields of the prompt's inputs are one instead.

The networks of FLUX.1 Kontext and FLUX.2 [klein] read images as tokens behind the picture's.
vLLM-Omni's pipelines take one request at a time and encode its text and images themselves. A recorded batch runs as one
request of theirs, which makes text to image: it has the latents of all recordings as rows, `encode_prompt` returns the
conditions of all, distinguished by the marks `PROMPT` and `NEGATIVE`, and `predict_noise` puts the images' tokens and
places, both from the model file, behind the picture's. Requests of a batch have images of the same sizes
(`engine.BarrierRequestScheduler`).

Differences of vLLM-Omni's pipelines to diffusers', which this replaces: klein refuses an empty prompt, and reads the
text encoder's layers that the encoder's config names; Kontext ignores `output_type`; klein and Kontext read images at
about 1024 x 1024 px. A further one, klein's guidance of distilled checkpoints, is refused before Ray starts.
"""

import copy
from collections.abc import Callable
from dataclasses import astuple
from inspect import signature
from typing import Any

import torch
from diffusers.pipelines.flux2 import pipeline_flux2_klein
from torch import Tensor, nn
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch, split_diffusion_output_by_request
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from verl_digen.inputs.images import PromptInputs, SourceImage
from verl_digen.models import load_model, qwen_image_edit
from verl_digen.models.base import Collated
from verl_digen.models.qwen_image import take_one_frame
from verl_digen.patches import vllm_omni_picture_processor
from verl_digen.rollout.vllm_omni.recorder import Recording
from verl_digen.rollout.vllm_omni.request_pipelines import FluxRecording, HandsOverEncoded, cast_encoders
from verl_digen.types import Condition, Geometry, Sampling

PROMPT, NEGATIVE = "prompt", ""
"""Texts that the pipelines are given; they encode the negative one, which is empty in klein's own code, second."""
DIFFUSERS_KLEIN: type[Any] = pipeline_flux2_klein.Flux2KleinPipeline


def restored(key: Any) -> PromptInputs:
    """Inverse of `astuple` of a prompt's inputs: plain values, which vLLM-Omni's cache of prompts compares."""
    text, images, *others = key
    return PromptInputs(text, tuple(SourceImage(*image) for image in images), *others)


class EncodesImages(HandsOverEncoded):
    """Mixin for a pipeline whose model file encodes a prompt and its images (`encode_with`)."""

    _model: Any

    def encode_inputs(self, inputs: PromptInputs) -> Condition:
        return dict(self._own_encode_prompt(prompt=inputs.text, inputs=astuple(inputs)))

    def _encode_given(self, prompt: str | list[str], inputs: Any = None, **arguments: Any) -> Any:
        """Encode a prompt's inputs, see `restored` -> items of a condition; without any, as the pipeline does."""
        encode_prompt = self._pipelines_encode_prompt
        if inputs is None:
            return encode_prompt(prompt=prompt, **arguments)
        return tuple(self._model.encode_with(self, encode_prompt, restored(inputs)).items())


class EditRecording(EncodesImages):
    """Qwen-Image-Edit, the first one."""

    _model: qwen_image_edit.QwenImageEditPlus

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        processor = load_model(od_config.model).pipeline_parts()["processor"]
        with vllm_omni_picture_processor.made_of_pictures(type(self), processor):
            super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        take_one_frame(self.vae)  # type: ignore[attr-defined]

    # -- conditions ---------------------------------------------------------------------------------------
    def _conditions_of_request(self, prompt_name: str = "prompt", **arguments: Any) -> tuple[Tensor, Tensor]:
        """[1, L, D] tokens and their mask, of the prompt or of the negative prompt."""
        recording = self._recording
        condition = recording.condition if prompt_name == "prompt" else recording.negative_condition
        assert condition is not None
        embeds = condition["embeds"].unsqueeze(0)
        return embeds, torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)

    # -- vLLM-Omni's --------------------------------------------------------------------------------------
    def prepare_latents(self, images: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        """Latents before the first step and of the images: while a recorded request runs, its own."""
        if self._schedule is None:
            return super().prepare_latents(images, *arguments)  # type: ignore[misc]
        *_, dtype, device, _, latents = arguments
        source = self._recording.condition.get("source")
        given = latents.to(device=device, dtype=dtype)
        return given, None if source is None else source.unsqueeze(0).to(device=device, dtype=dtype)

    def prompt_fields(self, recording: Recording) -> dict[str, Any]:
        return {"additional_information": self.image_sizes(recording.request.sampling.geometry)}

    def image_sizes(self, geometry: Geometry) -> dict[str, Any]:
        """Entries that the pipeline's pre-processing would make: sizes of the images, without pixels."""
        ((height, width),) = geometry.sources
        return {
            "prompt_image": None,
            "preprocessed_image": None,
            "calculated_height": height,
            "calculated_width": width,
        }


class EditPlusRecording(EditRecording):
    """Qwen-Image-Edit-Plus."""

    def image_sizes(self, geometry: Geometry) -> dict[str, Any]:
        sizes = [(width, height) for height, width in geometry.sources]
        return {"condition_images": None, "vae_images": None, "vae_image_sizes": sizes}


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
        latents = torch.cat([request.sampling_params.latents for request in requests])  # type: ignore[misc] - as handed over
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
            negatives = [recording.negative_condition for recording in self._schedule.recordings]
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
