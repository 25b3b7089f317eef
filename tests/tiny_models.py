# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with random weights in the diffusers format, made in a second; for tests of numerics only.

Weights are drawn wide enough that a velocity visibly depends on the prompt, on sigma and on every position:
what a parity test cannot see it cannot guard.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

TEXT_WIDTH = 32
LATENT_CHANNELS = 4
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:\nuser\n",
    "assistant\n",
    "a red circle left of two small blue squares on a green background",
]
"""What the tokenizer learns its words from: the pipeline's prompt template, which it then splits into 34 + 5
tokens as the real one does, and a caption."""


def build_tiny_qwen_image(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen-Image checkpoint of 3 MB to `path`; the same weights for the same seed.

    8x8 px per latent position and 2x2 positions per token, as in the real one: 64x64 px are latents [16, 16].
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        QwenImagePipeline(
            scheduler=_scheduler(),
            vae=_vae(),
            text_encoder=_text_encoder(),
            tokenizer=_tokenizer(),
            transformer=_transformer(),
        ).save_pretrained(path)
    return Path(path)


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The published Qwen-Image schedule."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def _transformer() -> QwenImageTransformer2DModel:
    transformer = QwenImageTransformer2DModel(
        in_channels=LATENT_CHANNELS * 4,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    _draw_weights(transformer, gain=1.0)
    return transformer


def _vae() -> AutoencoderKLQwenImage:
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        num_res_blocks=1,
        latents_mean=[-0.75, 0.1, 0.95, -0.15],
        latents_std=[2.8, 1.4, 1.2, 2.0],
    )
    _draw_weights(vae, gain=1.0)
    return vae


def _text_encoder() -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": 512,
                "hidden_size": TEXT_WIDTH,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "initializer_range": 0.2,
                "bos_token_id": 0,
                "eos_token_id": 0,
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": TEXT_WIDTH,
                "fullatt_block_indexes": [0],
            },
        )
    )


def _tokenizer() -> Qwen2Tokenizer:
    blank = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(SPECIAL_TOKENS)}, merges=[])
    return blank.train_new_from_iterator(CORPUS * 2, vocab_size=500, new_special_tokens=SPECIAL_TOKENS)


def _draw_weights(module: nn.Module, gain: float) -> None:
    """Matrices with std gain/sqrt(fan_in), biases with std 0.3, norm weights around 1."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1 and "gamma" not in name:
            nn.init.normal_(parameter, std=gain / parameter[0].numel() ** 0.5)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
        else:
            nn.init.normal_(parameter, mean=1.0, std=0.1)
