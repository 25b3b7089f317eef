# SPDX-License-Identifier: Apache-2.0
"""Recording mixins of pipelines whose prompts have images: Qwen-Image-Edit and Qwen-Image-Edit-Plus.

An image travels as its reference in the request (`PromptInputs.images`) and is read where it is encoded, in the
engine's process. vLLM-Omni's own pre-processing, which has one size for all images, is skipped for a request with an
order (`engine.VersionedEngine`). Images are prepared and encoded by the model file, with the pipeline's encoder and
VAE, so that the condition is that of a `diffusers` replica. vLLM-Omni's prompt cache takes no images as keys: the
fields of the prompt's inputs are one instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.data import OmniDiffusionConfig

from verl_digen.inputs.images import PromptInputs, SourceImage
from verl_digen.models import load_model, qwen_image_edit
from verl_digen.models.qwen_image import take_one_frame
from verl_digen.patches import vllm_omni_picture_processor
from verl_digen.rollout.vllm_omni.recorder import Recording
from verl_digen.rollout.vllm_omni.request_pipelines import HandsOverEncoded
from verl_digen.types import Condition, Geometry


def restored(key: Any) -> PromptInputs:
    """Inverse of `astuple` of a prompt's inputs: plain values, which vLLM-Omni's cache of prompts compares."""
    text, images, *others = key
    return PromptInputs(text, tuple(SourceImage(*image) for image in images), *others)


class EncodesImages(HandsOverEncoded):
    """Mixin for a pipeline whose model file encodes a prompt and its images (`encode_with`)."""

    _model: Any

    def encode_inputs(self, inputs: PromptInputs) -> Condition:
        return dict(self._own_encode_prompt(prompt=inputs.text, inputs=astuple(inputs)))

    @property
    def _own_encode_prompt(self) -> Callable[..., Any]:
        return self._cached_encode_prompt or self._encode_given

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
