# SPDX-License-Identifier: Apache-2.0
"""A tiny Z-Image: 64x64 px are latents [4, 8, 8]."""

from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl_digen.models.tiny import parts


def make() -> ZImagePipeline:
    """Build the pipeline: 3 MB; the schedule of Z-Image-Turbo."""
    return ZImagePipeline(
        scheduler=parts.FlowScheduler(shift=3.0),
        vae=parts.image_vae(scaling_factor=0.3611, shift_factor=0.1159),
        # with its language head, as in published checkpoints; loading may leave the head out
        text_encoder=parts.drawn(
            Qwen3ForCausalLM,
            Qwen3Config(**parts.LANGUAGE_MODEL, num_hidden_layers=3, head_dim=16, tie_word_embeddings=True),
        ),
        tokenizer=parts.chat_tokenizer(),
        transformer=parts.drawn(
            ZImageTransformer2DModel,
            in_channels=parts.LATENT_CHANNELS,
            dim=32,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=parts.TEXT_WIDTH,
            axes_dims=[4, 6, 6],
            axes_lens=[640, 64, 64],
        ),
    )
