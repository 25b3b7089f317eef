# SPDX-License-Identifier: Apache-2.0
"""A tiny Z-Image: 64x64 px are latents [4, 8, 8]."""

from __future__ import annotations

from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl_digen.models.tiny.text import CORPUS, TEXT_WIDTH, VOCABULARY_SIZE, byte_tokenizer
from verl_digen.models.tiny.weights import LATENT_CHANNELS, draw_weights, image_vae

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen3's chat template for one user message."""


def make() -> ZImagePipeline:
    """Build the pipeline: 3 MB; the schedule of Z-Image-Turbo."""
    tokenizer = byte_tokenizer(
        ["user\n", "assistant\n", *CORPUS], specials=["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=_text_encoder(),
        tokenizer=tokenizer,
        transformer=_transformer(),
    )


def _transformer() -> ZImageTransformer2DModel:
    transformer = ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[640, 64, 64],
    )
    draw_weights(transformer)
    return transformer


def _text_encoder() -> Qwen3ForCausalLM:
    """Text encoder with its language head, as in published checkpoints; loading may leave the head out."""
    encoder = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=TEXT_WIDTH,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            tie_word_embeddings=True,
        )
    )
    draw_weights(encoder)
    return encoder
