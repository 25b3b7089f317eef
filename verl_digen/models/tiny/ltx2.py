# SPDX-License-Identifier: Apache-2.0
"""A tiny LTX-2: 9 frames of 64x64 px are 8 tokens of video and 9 of sound, with 8 channels each."""

import string
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import AutoencoderKLLTX2Video
from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import AutoencoderKLLTX2Audio
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaTokenizer,
    SiglipVisionConfig,
)

from verl_digen.models.tiny import parts

CHANNELS = 8
"""Channels of a token of video or of sound; the latter are two channels of four bins."""
MEL_BINS = 16
NUM_LAYERS = 2
SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]


def make() -> LTX2Pipeline:
    """Build the pipeline: 2 MB; the published schedule."""
    schedule: Any = {"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1}
    return LTX2Pipeline(
        scheduler=parts.FlowScheduler(**schedule, base_image_seq_len=1024, max_image_seq_len=4096),
        vae=_vae(),
        audio_vae=_audio_vae(),
        text_encoder=_text_encoder(),
        tokenizer=_tokenizer(),
        connectors=parts.drawn(
            LTX2TextConnectors,
            caption_channels=parts.TEXT_WIDTH,
            text_proj_in_factor=NUM_LAYERS + 1,
            video_connector_num_attention_heads=2,
            video_connector_attention_head_dim=parts.TEXT_WIDTH // 2,
            video_connector_num_layers=1,
            audio_connector_num_attention_heads=2,
            audio_connector_attention_head_dim=parts.TEXT_WIDTH // 2,
            audio_connector_num_layers=1,
            rope_type="split",
        ),
        transformer=parts.drawn(
            LTX2VideoTransformer3DModel,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            **parts.TWO_HEADS,
            cross_attention_dim=32,
            audio_in_channels=CHANNELS,
            audio_out_channels=CHANNELS,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
            num_layers=NUM_LAYERS,
            caption_channels=parts.TEXT_WIDTH,
            rope_type="split",
        ),
        vocoder=parts.drawn(
            LTX2Vocoder,
            in_channels=2 * MEL_BINS,
            hidden_channels=16,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3]],
            output_sampling_rate=400,
        ),
    )


def _tokenizer() -> Any:
    """A `GemmaTokenizer`: "red" is one token, other words are characters, and other characters bytes."""
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    vocabulary = [*SPECIAL_TOKENS, *bytes_, "▁", *string.ascii_letters, *string.digits, *string.punctuation]
    vocabulary += ["re", "red", "▁red"]
    merges: Any = [("r", "e"), ("re", "d"), ("▁", "red")]
    return GemmaTokenizer(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges, add_bos_token=True)


def _text_encoder() -> Gemma3ForConditionalGeneration:
    text = Gemma3TextConfig(
        vocab_size=parts.VOCABULARY_SIZE,
        hidden_size=parts.TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    vision: Any = SiglipVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return parts.drawn(Gemma3ForConditionalGeneration, config)


def _vae() -> AutoencoderKLLTX2Video:
    vae = parts.drawn(
        AutoencoderKLLTX2Video,
        latent_channels=CHANNELS,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        decoder_causal=False,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    _draw_statistics(vae)
    return vae


def _audio_vae() -> AutoencoderKLLTX2Audio:
    sizes = {"base_channels": CHANNELS, "latent_channels": CHANNELS // (MEL_BINS // 4), "mel_bins": MEL_BINS}
    vae = parts.drawn(AutoencoderKLLTX2Audio, num_res_blocks=1, **sizes)
    _draw_statistics(vae)
    return vae


def _draw_statistics(vae: Any) -> None:
    """Draw the mean and the standard deviation of each channel, which checkpoints hold beside the weights."""
    vae.latents_mean.copy_(torch.linspace(-0.5, 0.5, CHANNELS))
    vae.latents_std.copy_(torch.linspace(0.7, 1.6, CHANNELS))
