# SPDX-License-Identifier: Apache-2.0
"""FLUX.1 [dev] and [schnell]: text to image, as diffusers' `FluxPipeline` runs them.

- A token is a 2x2 patch of latent positions, so packed latents are [tokens, 4 * latent channels].
- Two text encoders: CLIP's pooled vector and T5's tokens, always padded to 512 for dev and 256 for schnell,
  without a mask. CLIP reads a long prompt's first 77 tokens, as in the pipeline, and T5 all of it.
- dev takes a guidance scale as an input, schnell does not. True classifier-free guidance works with both, in
  addition; dev was not made for it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from torch import Tensor, nn

from verl_digen.hardware.transfers import to_device
from verl_digen.models.base import TIMESTEPS_PER_SIGMA, Collated, Decoder, EncodePrompt, PackedModel, PromptCheck
from verl_digen.models.pixels import load_image_decoder
from verl_digen.models.spec import (
    JOINT_ATTENTION,
    MODULATION,
    ConditionLayout,
    FlopsLayout,
    ModelSpec,
    SequenceLayout,
    VllmOmniServing,
)
from verl_digen.models.text import length_check
from verl_digen.types import Condition, Geometry

MAX_TEXT_TOKENS_DEV = 512
"""T5 tokens of a guidance-distilled checkpoint; the pipeline's default."""
MAX_TEXT_TOKENS_SCHNELL = 256
"""T5 tokens of schnell, without guidance input and dynamic shift: its maximum (diffusers' documentation of Flux)."""
DEFAULT_GUIDANCE = 3.5
"""The pipeline's default `guidance_scale`."""


class Flux(PackedModel):
    spec = ModelSpec(
        transformer="FluxTransformer2DModel",
        title="FLUX.1",
        example="black-forest-labs/FLUX.1-dev",
        components=(*ModelSpec.components, "text_encoder_2", "tokenizer_2"),
        # Attention and feed-forward of both streams and the single blocks' attention, as flow_grpo trains FLUX.1.
        lora_targets=(*JOINT_ATTENTION, *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")),
        flops=FlopsLayout(
            patch="x_embedder",
            streams=(
                (MODULATION, "row"),
                (r"single_transformer_blocks", "joint"),
                (r"context_embedder|ff_context|attn\.add_|to_add_out", "text"),
            ),
            attention=((r"", "joint", "joint"),),
        ),
        condition=ConditionLayout(
            width="joint_attention_dim", pooled="pooled_projection_dim", num_tokens=MAX_TEXT_TOKENS_DEV
        ),
        sequence=SequenceLayout(splits_prompts=True),
        vllm_omni=VllmOmniServing(pipeline="FluxPipeline", mixin=".request_pipelines:FluxRecording"),
    )

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.max_text_tokens = MAX_TEXT_TOKENS_DEV
        if self._network["guidance_embeds"]:
            self.default_embedded_guidance = DEFAULT_GUIDANCE
        elif not self._schedule.get("use_dynamic_shifting"):  # schnell, not a dev whose guidance was trained away
            self.max_text_tokens = MAX_TEXT_TOKENS_SCHNELL
            self.spec = replace(
                self.spec,
                condition=replace(self.spec.condition, num_tokens=MAX_TEXT_TOKENS_SCHNELL),
                selftest={**self.spec.selftest, "max_sequence_length": MAX_TEXT_TOKENS_SCHNELL},
            )

    # -- loading ------------------------------------------------------------------------------------------
    def load_prompt_check(self) -> PromptCheck:
        return length_check(self.load_tokenizer("tokenizer_2"), title=self.spec.title, max_tokens=self.max_text_tokens)

    def encode_text(self, pipeline: Any, encode_prompt: EncodePrompt, text: str) -> Condition:
        """Encode into {"embeds": [L, D], "pooled": [E]}, L the same for every prompt."""
        embeds, pooled, _ = encode_prompt(text, max_sequence_length=self.max_text_tokens)
        return {"embeds": embeds[0], "pooled": pooled[0]}

    def load_decoder(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        def unpack(latents: Tensor, geometry: Geometry) -> Tensor:
            return FluxPipeline._unpack_latents(latents, geometry.height_px, geometry.width_px, self._vae_scale)

        def pack(latents: Tensor) -> Tensor:
            return FluxPipeline._pack_latents(latents, *latents.shape)

        return load_image_decoder(self.path / "vae", self.decoder_dtype(dtype), device, unpack=unpack, pack=pack)

    # -- the network --------------------------------------------------------------------------------------
    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # "6. Denoising loop" of FluxPipeline.__call__; there too the timestep is rounded to the network's dtype,
        # then divided.
        dtype, device = self.input_dtype(transformer), latents.device
        return transformer(
            hidden_states=latents.to(dtype),
            timestep=to_device(self.timesteps(sigmas), device, dtype) / TIMESTEPS_PER_SIGMA,
            guidance=condition.get("guidance"),
            pooled_projections=condition["pooled"].to(dtype),
            encoder_hidden_states=condition["embeds"].to(dtype),
            txt_ids=torch.zeros(condition["embeds"].shape[1], 3, device=device, dtype=dtype),
            img_ids=to_device(self._image_ids(geometry, dtype), device),
            return_dict=False,
        )[0]

    def _image_ids(self, geometry: Geometry, dtype: torch.dtype) -> Tensor:
        """[tokens, 3] positions, made on the host: the pipeline's own copy to a device would wait for it."""
        rows, columns = self._token_grid(geometry)
        return FluxPipeline._prepare_latent_image_ids(1, rows, columns, torch.device("cpu"), dtype)
