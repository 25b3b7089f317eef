# SPDX-License-Identifier: Apache-2.0
"""A tiny HunyuanVideo: 5 frames of 64x64 px are latents [4, 2, 8, 8]."""

from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTransformer3DModel
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE, HunyuanVideoPipeline
from transformers import LlamaConfig, LlamaModel

from verl_digen.models.tiny import parts

CLIP_WIDTH = 16
SPECIAL_TOKENS = ["<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def make() -> HunyuanVideoPipeline:
    """Build the pipeline: 3 MB; the published schedule."""
    return HunyuanVideoPipeline(
        text_encoder=parts.drawn(LlamaModel, LlamaConfig(**parts.LANGUAGE_MODEL, num_hidden_layers=4)),
        tokenizer=parts.byte_tokenizer([DEFAULT_PROMPT_TEMPLATE["template"], *parts.CORPUS], SPECIAL_TOKENS),
        transformer=parts.drawn(
            HunyuanVideoTransformer3DModel,
            in_channels=parts.LATENT_CHANNELS,
            out_channels=parts.LATENT_CHANNELS,
            **parts.TWO_HEADS,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=parts.TEXT_WIDTH,
            pooled_projection_dim=CLIP_WIDTH,
            rope_axes_dim=(4, 6, 6),
        ),
        vae=parts.drawn(AutoencoderKLHunyuanVideo, block_out_channels=(8, 8, 8, 8), **parts.SMALL_VAE),
        scheduler=parts.FlowScheduler(shift=7.0),
        text_encoder_2=parts.clip_encoder(CLIP_WIDTH, projects=False),
        tokenizer_2=parts.clip_tokenizer(),
    )
