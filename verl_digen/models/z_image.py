# SPDX-License-Identifier: Apache-2.0
"""Z-Image: text to image, as diffusers' `ZImagePipeline` runs it.

Latents are [C, H/8, W/8]: the network cuts its own 2x2 patches. It takes lists, one tensor per row, and pads and masks
by itself. Its time is reversed: the network's input is 1 - sigma, its output minus the velocity. The scale w of
classifier-free guidance is ours, v_neg + w (v_pos - v_neg). The pipeline's `guidance_scale` is w - 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas
from torch import Tensor, nn

from verl_digen.hardware.transfers import to_device
from verl_digen.models.base import PATCH, TIMESTEPS_PER_SIGMA, Collated, DiffusionModel, EncodePrompt, PromptCheck
from verl_digen.models.schedule import flow_sigmas
from verl_digen.models.spec import ConditionLayout, FlopsLayout, ModelSpec, VllmOmniServing
from verl_digen.models.text import chat_text, length_check
from verl_digen.types import Condition, Geometry

MAX_TEXT_TOKENS = 512
"""Tokens of a prompt in its chat template; the pipeline's default."""


class ZImage(DiffusionModel):
    spec = ModelSpec(
        transformer="ZImageTransformer2DModel",
        title="Z-Image",
        example="Tongyi-MAI/Z-Image-Turbo",
        # All projections of every block, the refiners' too.
        lora_targets=(
            *("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
            *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
        ),
        flops=FlopsLayout(
            patch="all_x_embedder.2-1",
            streams=(
                (r"t_embedder|adaLN_modulation", "row"),
                (r"cap_embedder|context_refiner", "text"),
                (r"^(.*\.)?layers\.|all_final_layer", "joint"),
            ),
            attention=(
                (r"noise_refiner", "image", "image"),
                (r"context_refiner", "text", "text"),
                (r"", "joint", "joint"),
            ),
            multiple=32,
        ),
        condition=ConditionLayout(width="cap_feat_dim"),
        selftest={"guidance_scale": 0.0},
        vllm_omni=VllmOmniServing(pipeline="ZImagePipeline", mixin=".request_pipelines:ZImageRecording"),
    )

    # -- loading ------------------------------------------------------------------------------------------
    def load_prompt_check(self) -> PromptCheck:
        tokenizer = self.load_tokenizer("tokenizer")
        wrap = chat_text(tokenizer, enable_thinking=True)
        return length_check(tokenizer, title=self.spec.title, max_tokens=MAX_TEXT_TOKENS, wrap=wrap)

    def encode_text(self, pipeline: Any, encode_prompt: EncodePrompt, text: str) -> Condition:
        """Encode into {"embeds": [L, D]}, L the prompt's own number of tokens, template included."""
        (embeds,), _ = encode_prompt([text], do_classifier_free_guidance=False, max_sequence_length=MAX_TEXT_TOKENS)
        return {"embeds": embeds}

    # -- the shape of the problem -------------------------------------------------------------------------
    def latent_shape(self, geometry: Geometry) -> tuple[int, ...]:
        self.spec.check_size(geometry, px_multiple=self._vae_scale * PATCH)
        return self._num_channels, geometry.height_px // self._vae_scale, geometry.width_px // self._vae_scale

    def sigmas(self, num_steps: int, geometry: Geometry) -> Tensor:
        # "5. Prepare timesteps" of ZImagePipeline.__call__.
        _, height, width = self.latent_shape(geometry)
        num_tokens = (height // PATCH) * (width // PATCH)
        return flow_sigmas(self._schedule, num_tokens=num_tokens, sigmas=get_default_z_image_sigmas(num_steps))

    # -- the network --------------------------------------------------------------------------------------
    def collate(self, conditions: Sequence[Condition]) -> Collated:
        """{"embeds": N tensors [L, D], each of its own length}."""
        return {"embeds": [condition["embeds"] for condition in conditions]}

    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # "6. Denoising loop" of ZImagePipeline.__call__.
        dtype = self.input_dtype(transformer)
        timesteps = (TIMESTEPS_PER_SIGMA - self.timesteps(sigmas)) / TIMESTEPS_PER_SIGMA
        one_frame = latents.to(dtype).unsqueeze(2)
        predicted = transformer(
            list(one_frame.unbind()),
            to_device(timesteps, latents.device),
            [embeds.to(dtype) for embeds in condition["embeds"]],
            return_dict=False,
        )[0]
        return -torch.stack(predicted).squeeze(2)
