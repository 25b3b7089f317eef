# SPDX-License-Identifier: Apache-2.0
"""Recording mixins of pipelines that continue an image: Wan2.1 and Wan2.2 A14B image to video, Wan2.2 TI2V-5B, which
also makes videos from text alone, and HunyuanVideo 1.5 image to video.

An image is read and encoded as in `edit_pipelines.py`, with the pipeline's own parts in the dtypes of a `diffusers`
replica's. While a recorded request runs, its condition replaces the image that vLLM-Omni would read and encode.

| vLLM-Omni differs from diffusers | here |
| --- | --- |
| Wan image to video: CLIP sees the image at the video's size; diffusers' as it is | the model file's image |
| it runs CLIP in the network's dtype; diffusers' documentation in fp32 | CLIP is loaded again, in fp32 |
| it ignores the index's `expand_timesteps` | such checkpoints run in `WanPipeline`, which reads it |
| it takes `"transformer_2": [null, null]` in the index for a second expert | `patches/vllm_omni_wan_index.py` |
| HunyuanVideo 1.5 stretches an image to the video's size; diffusers crops it | the model file's image |

Both libraries step a given first frame of TI2V-5B with the others and overwrite it; here it is not sampled.
"""

from dataclasses import astuple
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPVisionModel
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.utils import get_local_device

from verl_digen.inputs.images import PromptInputs
from verl_digen.models.hunyuan_video15_image import HunyuanVideo15ImageToVideo
from verl_digen.models.wan_first_frame import WanFirstFrame
from verl_digen.models.wan_image import WanImageToVideo, frame_pipeline
from verl_digen.patches import vllm_omni_wan_index
from verl_digen.rollout.vllm_omni.edit_pipelines import restored
from verl_digen.rollout.vllm_omni.recorder import Recording
from verl_digen.rollout.vllm_omni.request_pipelines import HunyuanVideo15Recording, WanRecording
from verl_digen.types import Condition

FIRST = slice(0, 1)
OTHERS = slice(1, None)
"""Latent frames of a video whose first frame is given."""
PLACEHOLDER = {"multi_modal_data": {"image": torch.zeros(3, 1, 1)}}
"""Prompt field with an image that a pipeline requires; it is not read while recorded requests run."""


def image_arguments(inputs: PromptInputs) -> dict[str, Any]:
    """Argument of `encode_prompt` that names a prompt's image and its video's size, see `restored`; {} without one."""
    return {"inputs": astuple(inputs)} if inputs.images else {}


def image_items(pipeline: Any, parts: Any, inputs: Any) -> list[tuple[str, Tensor]]:
    """Items of a condition from a prompt's image, which `parts` encode, as vLLM-Omni's cache keeps them behind what the
    pipeline encodes: in the dtype that `digen plan` counts."""
    added = pipeline._model.encode_images(parts, restored(inputs), get_local_device())
    return [(name, tensor.to(pipeline.od_config.dtype)) for name, tensor in added.items()]


def recorded_inputs(recording: "WanImageRecording | HunyuanVideo15ImageRecording") -> Any:
    """Inputs of the network from the images of running requests, see `image_inputs` of the model file."""
    schedule, model = recording._schedule, recording._model
    assert schedule is not None
    condition = model.collate([each.condition for each in schedule.recordings])
    latents = torch.cat([each.latents for each in schedule.recordings])
    return model.image_inputs(latents, condition, schedule.recordings[0].request.sampling.geometry)


class FrameRecording(WanRecording):
    """Base of the Wan mixins whose prompts may have an image."""

    def encode_inputs(self, inputs: PromptInputs) -> Condition:
        return self.encode_text(inputs.text, **image_arguments(inputs))

    def encode_prompt(self, *arguments: Any, inputs: Any = None, **more: Any) -> Any:
        encoded = super().encode_prompt(*arguments, **more)  # type: ignore[misc]
        return encoded if inputs is None else (*encoded, *image_items(self, self._parts, inputs))

    _model: WanImageToVideo | WanFirstFrame

    @cached_property
    def _parts(self) -> Any:
        """diffusers' pipeline around this one's encoders of images."""
        return frame_pipeline(self._model, vae=self.vae)  # type: ignore[attr-defined]


class WanFrameRecording(FrameRecording):
    """Wan2.1 and Wan2.2 from text; TI2V-5B also from a text and its first frame, which every step is given."""

    def diffuse(self, *, latents: Tensor, **arguments: Any) -> Tensor:
        """Run the pipeline's loop -> whole videos. `latents`: [N, C, F, H, W]; if a first frame is given, of the other
        F - 1 frames."""
        if self._schedule is None or "source" not in self._schedule.recordings[0].condition:
            return super().diffuse(latents=latents, **arguments)  # type: ignore[misc]
        conditions = [recording.condition for recording in self._schedule.recordings]
        whole = self._model.completed(latents, conditions)
        is_sampled = torch.ones_like(whole[:, :1])
        is_sampled[:, :, FIRST] = 0
        given = {"latent_condition": whole[:, :, FIRST], "first_frame_mask": is_sampled}
        return super().diffuse(latents=whole, **arguments | given)  # type: ignore[misc]

    def decoded_latents(self, recording: Recording) -> Tensor:
        return self._model.completed(recording.latents, [recording.condition])

    def scheduler_step_maybe_with_cfg(
        self, noise_pred: Tensor, t: Tensor, latents: Tensor, *arguments: Any, **more: Any
    ) -> Tensor:
        """Step the frames that are sampled; a given one stays."""
        step = super().scheduler_step_maybe_with_cfg  # type: ignore[misc]
        if self._schedule is None or "source" not in self._schedule.recordings[0].condition:
            return step(noise_pred, t, latents, *arguments, **more)
        stepped = step(noise_pred[:, :, OTHERS], t, latents[:, :, OTHERS], *arguments, **more)
        return torch.cat([latents[:, :, FIRST], stepped], dim=2)


class WanImageRecording(FrameRecording):
    """Wan2.1 and Wan2.2 A14B, image to video."""

    _model: WanImageToVideo

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        with vllm_omni_wan_index.without_missing_parts():
            super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        if self.image_encoder is None:
            return
        self.image_processor = self._model.pipeline_parts()["image_processor"]
        folder, dtype = "image_encoder", self._model.part_dtype("image_encoder", od_config.dtype)
        self.image_encoder: Any = CLIPVisionModel.from_pretrained(self._model.path / folder, dtype=dtype)
        self.image_encoder.eval().to(get_local_device())

    @cached_property
    def _parts(self) -> Any:
        parts = {name: getattr(self, name) for name in ("vae", "image_encoder", "image_processor")}
        return frame_pipeline(self._model, **parts)

    def prompt_fields(self, recording: Recording) -> dict[str, Any]:
        return super().prompt_fields(recording) | PLACEHOLDER

    # -- vLLM-Omni's --------------------------------------------------------------------------------------
    def encode_image(self, *arguments: Any, **more: Any) -> Tensor:
        """CLIP's tokens: while recorded requests run, their own."""
        if self._schedule is None:
            return super().encode_image(*arguments, **more)  # type: ignore[misc]
        _, tokens = recorded_inputs(self)
        assert tokens is not None, "the checkpoint has CLIP"
        return tokens

    def prepare_latents(self, *, latents: Tensor | None = None, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Latents before the first step, what the network reads beside them, and a mask that it does not read: while
        recorded requests run, their own."""
        if self._schedule is None:
            return super().prepare_latents(latents=latents, **arguments)  # type: ignore[misc]
        assert latents is not None
        given = latents.to(arguments["device"], arguments["dtype"])
        source, _ = recorded_inputs(self)
        return given, source.to(given), torch.ones_like(given[:, :1])


class HunyuanVideo15ImageRecording(HunyuanVideo15Recording):
    """HunyuanVideo 1.5, image to video."""

    _model: HunyuanVideo15ImageToVideo

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        super().__init__(od_config=od_config, prefix=prefix)
        self.feature_extractor = self._model.pipeline_parts()["feature_extractor"]

    def encode_inputs(self, inputs: PromptInputs) -> Condition:
        return self.encode_text(inputs.text, **image_arguments(inputs))

    def _encode_given(self, prompt: Any, inputs: Any = None, **more: Any) -> Any:
        encoded = self._pipelines_encode_prompt(prompt=prompt, **more)
        return encoded if inputs is None else (*encoded, *image_items(self, self, inputs))

    def prompt_fields(self, recording: Recording) -> dict[str, Any]:
        return PLACEHOLDER

    # -- vLLM-Omni's --------------------------------------------------------------------------------------
    def _get_image_latents(self, *arguments: Any) -> Tensor:
        """[1, C, 1, H, W] latents of the image: while a recorded request runs, its own."""
        if self._schedule is None:
            return super()._get_image_latents(*arguments)  # type: ignore[misc]
        source, _ = recorded_inputs(self)
        return source.unsqueeze(2)

    def _get_image_embeds(self, *arguments: Any) -> Tensor:
        """SigLIP's tokens: while a recorded request runs, its own."""
        if self._schedule is None:
            return super()._get_image_embeds(*arguments)  # type: ignore[misc]
        _, tokens = recorded_inputs(self)
        return tokens
