# SPDX-License-Identifier: Apache-2.0
"""Subclasses, one per model, of `RequestRecordingMixin`, for pipelines without step execution: prompt encoding and
guidance parameters. `ModelSpec.vllm_omni` of the model file names its class."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from verl_digen.models import flux, sd3, wan, z_image
from verl_digen.models.checkpoint import in_one_dtype
from verl_digen.patches import vllm_omni_z_image_sizes
from verl_digen.rollout.vllm_omni.recorder import Recording
from verl_digen.rollout.vllm_omni.request_mode import RequestRecordingMixin
from verl_digen.types import Condition, Sampling


class StableDiffusion3Recording(RequestRecordingMixin):
    def encode_text(self, text: str) -> Condition:
        embeds, pooled = self.encode_prompt(  # type: ignore[attr-defined]
            prompt=text, prompt_2="", prompt_3="", max_sequence_length=sd3.MAX_TEXT_TOKENS
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}

    def predict_noise(self, *args: Any, timestep: Tensor, **kwargs: Any) -> Tensor:
        """Undo vLLM-Omni's rounding of the timestep to the network's dtype; the trainer and diffusers do not round."""
        if self._schedule is not None:
            timestep = self._schedule.timestep.expand_as(timestep)
        return super().predict_noise(*args, timestep=timestep, **kwargs)


class FluxRecording(RequestRecordingMixin):
    """FLUX. The pipeline's `guidance_scale` is the network's embedded guidance; its `true_cfg_scale` is ours."""

    _model: flux.Flux

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        _name_packed_layers(self.transformer)  # type: ignore[attr-defined]
        cast_encoders(self)

    def encode_text(self, text: str) -> Condition:
        embeds, pooled, _ = self.encode_prompt(  # type: ignore[attr-defined]
            prompt=text, prompt_2=None, max_sequence_length=self._model.max_text_tokens
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}

    def set_guidance(self, params: OmniDiffusionSamplingParams, sampling: Sampling) -> None:
        params.true_cfg_scale = sampling.true_cfg_scale
        params.guidance_scale = self._model.embedded_guidance(sampling.guidance_scale)


class WanRecording(RequestRecordingMixin):
    """Wan2.1 and Wan2.2; `frame_pipelines.py` adds images."""

    _model: wan.Wan

    def encode_text(self, text: str, **images: Any) -> Condition:
        """Encode one prompt. `images`: arguments with which `encode_prompt` also returns items of the condition."""
        # diffusers' pipeline cleans the text more thoroughly than vLLM-Omni's
        text = prompt_clean(text)
        embeds, _, *items = self.encode_prompt(  # type: ignore[attr-defined]
            prompt=text, do_classifier_free_guidance=False, max_sequence_length=wan.MAX_TEXT_TOKENS, **images
        )
        own = embeds[0, : len(self.tokenizer(text).input_ids)]  # type: ignore[attr-defined]
        return {"embeds": own, **dict(items)}

    def set_guidance(self, params: OmniDiffusionSamplingParams, sampling: Sampling) -> None:
        """Set one guidance scale for both experts."""
        super().set_guidance(params, sampling)
        params.boundary_ratio = self._model.boundary_ratio or 0.0


class HandsOverEncoded(RequestRecordingMixin):
    """Mixin for a pipeline whose requests cannot carry conditions: `encode_prompt` returns them instead."""

    supports_request_batch = False
    """Flag read by vLLM-Omni: one request at a time."""
    _cached_encode_prompt: Callable[..., Any] | None = None
    """vLLM-Omni's prompt cache around the pipeline's `encode_prompt`."""
    _encode_given: Callable[..., Any] | None = None
    """Method in place of the pipeline's `encode_prompt`, which also encodes images."""

    @property
    def encode_prompt(self) -> Callable[..., Any]:
        """A function that returns the recorded request's conditions while there is one, else the pipeline's own."""
        return self._own_encode_prompt if self._schedule is None else self._conditions_of_request

    @encode_prompt.setter
    def encode_prompt(self, encode: Callable[..., Any]) -> None:
        self._cached_encode_prompt = encode

    @property
    def _own_encode_prompt(self) -> Callable[..., Any]:
        return self._cached_encode_prompt or self._encode_given or self._pipelines_encode_prompt

    @property
    def _pipelines_encode_prompt(self) -> Callable[..., Any]:
        return super().encode_prompt  # type: ignore[misc]

    @property
    def _recording(self) -> Recording:
        """The request that runs alone."""
        assert self._schedule is not None
        (recording,) = self._schedule.recordings
        return recording

    def _conditions_of_request(self, **arguments: Any) -> tuple[Any, ...]:
        """The conditions in the form that the pipeline's `encode_prompt` returns."""
        raise NotImplementedError

    def prompt_fields(self, recording: Recording) -> dict[str, Any]:
        return {}


class ZImageRecording(HandsOverEncoded):
    """Z-Image. The pipeline's `guidance_scale` counts from 0: it is ours minus 1."""

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        with vllm_omni_z_image_sizes.network_of_checkpoint(od_config):
            super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]

    def encode_text(self, text: str) -> Condition:
        (embeds,), _ = self._own_encode_prompt(
            prompt=text, do_classifier_free_guidance=False, max_sequence_length=z_image.MAX_TEXT_TOKENS
        )
        return {"embeds": embeds}

    def _conditions_of_request(self, **arguments: Any) -> tuple[Any, ...]:
        negative = self._recording.negative_condition
        return [self._recording.condition["embeds"]], [] if negative is None else [negative["embeds"]]

    def set_guidance(self, params: OmniDiffusionSamplingParams, sampling: Sampling) -> None:
        params.guidance_scale = sampling.true_cfg_scale - 1.0


class HunyuanVideo15Recording(HandsOverEncoded):
    """HunyuanVideo 1.5; `frame_pipelines.py` adds images."""

    tiles_vae = True

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        _name_packed_layers(self.transformer)  # type: ignore[attr-defined]

    def encode_text(self, text: str, **images: Any) -> Condition:
        """Encode one prompt; `images` as in `WanRecording`."""
        found = self._own_encode_prompt(prompt=text, device=get_local_device(), dtype=self.od_config.dtype, **images)
        (embeds, mask, glyphs, glyph_mask), items = found[:4], found[8:]  # without the negative prompt's
        condition = {"embeds": embeds[0][mask[0].bool()], "glyphs": glyphs[0][glyph_mask[0].bool()]}
        return condition | dict(items)

    def _conditions_of_request(self, **arguments: Any) -> tuple[Any, ...]:
        """Tokens and masks of prompt and glyphs, then of the negative prompt."""
        given: list[Tensor | None] = []
        for condition in (self._recording.condition, self._recording.negative_condition):
            for name in ("embeds", "glyphs"):
                tokens = None if condition is None else condition[name].unsqueeze(0)
                given += [tokens, None if tokens is None else torch.ones_like(tokens[..., 0])]
        return tuple(given)


def cast_encoders(pipeline: Any) -> None:
    """Cast the text encoders of one of vLLM-Omni's pipelines, which loads them in the dtype of their files."""
    for folder in pipeline._encoder_modules:
        in_one_dtype(getattr(pipeline, folder), pipeline._model.part_dtype(folder, pipeline.od_config.dtype))


def _name_packed_layers(transformer: Any) -> None:
    """Set the attribute that vLLM-Omni's LoRA manager reads, from the network's `packed_modules_mapping`."""
    transformer.stacked_params_mapping = [
        (packed, part, part) for packed, parts in transformer.packed_modules_mapping.items() for part in parts
    ]
