# SPDX-License-Identifier: Apache-2.0
"""Tiny FLUX.1 [dev], [schnell] and Kontext: 64x64 px are latents [16, 16]."""

from typing import Any

from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from diffusers.pipelines.flux.pipeline_flux_kontext import FluxKontextPipeline

from verl_digen.models.tiny import parts

CLIP_WIDTH = 16
SHIFTED = parts.FlowScheduler(shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)


def make_dev() -> FluxPipeline:
    """Build dev: 1 MB; with guidance input and the published schedule, which is shifted by the size."""
    return FluxPipeline(**_parts(SHIFTED, takes_guidance=True))


def make_kontext() -> FluxKontextPipeline:
    """Build Kontext: 1 MB; every part as in dev."""
    return FluxKontextPipeline(**_parts(SHIFTED, takes_guidance=True))


def make_schnell() -> FluxPipeline:
    """Build schnell: 1 MB; without guidance input, and with the published schedule, which is not shifted."""
    return FluxPipeline(**_parts(parts.FlowScheduler(shift=1.0), takes_guidance=False))


def _parts(scheduler: parts.FlowScheduler, *, takes_guidance: bool) -> dict[str, Any]:
    transformer = parts.drawn(
        FluxTransformer2DModel,
        in_channels=parts.LATENT_CHANNELS * 4,
        num_layers=1,
        num_single_layers=1,
        **parts.TWO_HEADS,
        joint_attention_dim=parts.TEXT_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        guidance_embeds=takes_guidance,
        axes_dims_rope=(4, 6, 6),
    )
    return {
        "scheduler": scheduler,
        "vae": parts.image_vae(scaling_factor=0.3611, shift_factor=0.1159),
        "text_encoder": parts.clip_encoder(CLIP_WIDTH, projects=False),
        "tokenizer": parts.clip_tokenizer(),
        "text_encoder_2": parts.t5_encoder(),
        "tokenizer_2": parts.t5_tokenizer(),
        "transformer": transformer,
    }
