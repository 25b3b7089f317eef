# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen-Image: 8x8 px per latent position and 2x2 positions per token, so 64x64 px are latents [16, 16]."""

from typing import Any

from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from verl_digen.models.tiny import parts

CORPUS = [
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:\nuser\n",
    "assistant\n",
    "a red circle left of two small blue squares on a green background",
]
"""Training text of the tokenizer: the pipeline's prompt template, which it then splits into 34 + 5 tokens like the
real one, and a caption."""


def make() -> QwenImagePipeline:
    """Build the pipeline: 3 MB."""
    return QwenImagePipeline(
        scheduler=make_scheduler(),
        vae=make_vae(),
        text_encoder=make_text_encoder(),
        tokenizer=tokenizer(),
        transformer=make_transformer(),
    )


def make_scheduler() -> parts.FlowScheduler:
    """The published Qwen-Image schedule."""
    return parts.FlowScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def make_transformer() -> QwenImageTransformer2DModel:
    return parts.drawn(
        QwenImageTransformer2DModel,
        in_channels=parts.LATENT_CHANNELS * 4,
        out_channels=parts.LATENT_CHANNELS,
        num_layers=2,
        **parts.TWO_HEADS,
        joint_attention_dim=parts.TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )


def make_vae() -> AutoencoderKLQwenImage:
    return parts.drawn(AutoencoderKLQwenImage, **parts.CAUSAL_VAE)


def make_text_encoder(**token_ids: Any) -> Qwen2_5_VLForConditionalGeneration:
    """Build the language model and its vision tower; `token_ids` are the ids of image marks."""
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={**parts.QWEN_VL_TEXT, "num_hidden_layers": 2, "initializer_range": 0.2},
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": parts.TEXT_WIDTH,
                "fullatt_block_indexes": [0],
            },
            **token_ids,
        )
    )


def tokenizer() -> Qwen2Tokenizer:
    return parts.byte_tokenizer(CORPUS, parts.CHAT_TOKENS)
