# SPDX-License-Identifier: Apache-2.0
"""A tiny Stable Diffusion 3.5, with its first block's second attention: 64x64 px are latents [4, 8, 8]."""

from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline

from verl_digen.models.tiny import parts

CLIP_WIDTHS = (8, 16)
"""Sum less than T5's width, as in the real model, whose CLIP part is padded with zeros."""


def make() -> StableDiffusion3Pipeline:
    """Build the pipeline: 1 MB; with the published schedule, and the published VAE's scaling and shift."""
    return StableDiffusion3Pipeline(
        transformer=parts.drawn(
            SD3Transformer2DModel,
            sample_size=16,
            in_channels=parts.LATENT_CHANNELS,
            out_channels=parts.LATENT_CHANNELS,
            num_layers=2,
            **parts.TWO_HEADS,
            joint_attention_dim=parts.TEXT_WIDTH,
            caption_projection_dim=32,
            pooled_projection_dim=sum(CLIP_WIDTHS),
            pos_embed_max_size=32,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        scheduler=parts.FlowScheduler(shift=3.0),
        vae=parts.image_vae(scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=parts.clip_encoder(CLIP_WIDTHS[0], projects=True),
        tokenizer=parts.clip_tokenizer(),
        text_encoder_2=parts.clip_encoder(CLIP_WIDTHS[1], projects=True),
        tokenizer_2=parts.clip_tokenizer(),
        text_encoder_3=parts.t5_encoder(),
        tokenizer_3=parts.t5_tokenizer(),
    )
