# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3 and 3.5: text to image, as diffusers' `StableDiffusion3Pipeline` runs it.

Latents are [C, H/8, W/8]: the network cuts its own 2x2 patches. Of three text encoders two CLIPs give 77 tokens and a
pooled vector, T5 gives 256 tokens; all are read with padding and without a mask, so the padded length is part of the
model. The CLIPs read a long prompt's first 77 tokens, as in the pipeline, and T5 all of it.
"""

from typing import Any

from torch import Tensor, nn

from verl_digen.hardware.transfers import to_device
from verl_digen.models.base import Collated, DiffusionModel, EncodePrompt, PromptCheck
from verl_digen.models.schedule import flow_sigmas
from verl_digen.models.spec import JOINT_ATTENTION, MODULATION, ConditionLayout, FlopsLayout, ModelSpec, VllmOmniServing
from verl_digen.models.text import length_check
from verl_digen.types import Condition, Geometry

CLIP_TOKENS = 77
"""Tokens of a CLIP, to which every prompt is padded or cut."""
MAX_TEXT_TOKENS = 256
"""T5 tokens, to which every prompt is padded; the pipeline's default."""


class StableDiffusion3(DiffusionModel):
    spec = ModelSpec(
        transformer="SD3Transformer2DModel",
        title="Stable Diffusion 3",
        example="stabilityai/stable-diffusion-3.5-medium",
        components=(*ModelSpec.components, "text_encoder_2", "text_encoder_3", "tokenizer_2", "tokenizer_3"),
        # The joint attention of both streams, as flow_grpo trains SD3.5.
        lora_targets=JOINT_ATTENTION,
        flops=FlopsLayout(
            patch="pos_embed.proj",
            streams=((MODULATION, "row"), (r"context_embedder|ff_context|attn\.add_|to_add_out", "text")),
            attention=((r"attn2", "image", "image"), (r"", "joint", "joint")),
        ),
        condition=ConditionLayout(
            width="joint_attention_dim", pooled="pooled_projection_dim", num_tokens=CLIP_TOKENS + MAX_TEXT_TOKENS
        ),
        runs_in_fp16=True,
        selftest={"guidance_scale": 1.0},
        dispatches_attention=False,
        vllm_omni=VllmOmniServing(
            pipeline="StableDiffusion3Pipeline", mixin=".request_pipelines:StableDiffusion3Recording"
        ),
    )

    # -- loading ------------------------------------------------------------------------------------------
    def load_prompt_check(self) -> PromptCheck:
        return length_check(self.load_tokenizer("tokenizer_3"), title=self.spec.title, max_tokens=MAX_TEXT_TOKENS)

    def encode_text(self, pipeline: Any, encode_prompt: EncodePrompt, text: str) -> Condition:
        """Encode into {"embeds": [77 + 256, D], "pooled": [E]}."""
        embeds, _, pooled, _ = encode_prompt(
            text, None, None, do_classifier_free_guidance=False, max_sequence_length=MAX_TEXT_TOKENS
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}

    # -- the shape of the problem -------------------------------------------------------------------------
    def latent_shape(self, geometry: Geometry) -> tuple[int, ...]:
        px_per_token = self._vae_scale * self._network["patch_size"]
        # Positions are a learned square table, of which the network takes the middle.
        max_px = self._network["pos_embed_max_size"] * px_per_token
        self.spec.check_size(geometry, px_multiple=px_per_token, max_px=max_px)
        return self._num_channels, geometry.height_px // self._vae_scale, geometry.width_px // self._vae_scale

    def sigmas(self, num_steps: int, geometry: Geometry) -> Tensor:
        # "5. Prepare timesteps" of StableDiffusion3Pipeline.__call__.
        _, height, width = self.latent_shape(geometry)
        patch = self._network["patch_size"]
        num_tokens = (height // patch) * (width // patch)
        return flow_sigmas(self._schedule, num_tokens=num_tokens, num_inference_steps=num_steps)

    # -- the network --------------------------------------------------------------------------------------
    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # "7. Denoising loop" of StableDiffusion3Pipeline.__call__.
        dtype = self.input_dtype(transformer)
        return transformer(
            hidden_states=latents.to(dtype),
            timestep=to_device(self.timesteps(sigmas), latents.device),
            encoder_hidden_states=condition["embeds"].to(dtype),
            pooled_projections=condition["pooled"].to(dtype),
            return_dict=False,
        )[0]
