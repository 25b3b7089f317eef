# SPDX-License-Identifier: Apache-2.0
"""A tiny FLUX.2 [klein], not distilled: 64x64 px are latents [4 x 4, 16]."""

from typing import Any

from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl_digen.models.tiny import parts

WIDTH = 16
"""Hidden size of the text encoder; the network reads three of its states side by side."""
NUM_LAYERS = 28
"""Layers of the text encoder: the pipeline reads the states after 9, 18 and 27."""


def make() -> Flux2KleinPipeline:
    """Build the pipeline: 2 MB; with the schedule of FLUX.2, which is shifted by the size and the number of steps."""
    return Flux2KleinPipeline(
        scheduler=parts.FlowScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=_vae(),
        # with a language head of its own, as in the 9B checkpoints
        text_encoder=parts.drawn(
            Qwen3ForCausalLM,
            Qwen3Config(
                vocab_size=parts.VOCABULARY_SIZE,
                hidden_size=WIDTH,
                intermediate_size=32,
                num_hidden_layers=NUM_LAYERS,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                tie_word_embeddings=False,
            ),
        ),
        tokenizer=parts.chat_tokenizer(),
        transformer=parts.drawn(
            Flux2Transformer2DModel,
            in_channels=parts.LATENT_CHANNELS * 4,
            num_layers=1,
            num_single_layers=1,
            **parts.TWO_HEADS,
            joint_attention_dim=3 * WIDTH,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
        is_distilled=False,
    )


def _vae() -> AutoencoderKLFlux2:
    vae = parts.drawn(AutoencoderKLFlux2, block_out_channels=(8, 8, 16, 16), **parts.SMALL_VAE)
    statistics: Any = vae.bn
    nn.init.normal_(statistics.running_mean, std=0.3)
    nn.init.uniform_(statistics.running_var, 0.5, 2.0)
    return vae
