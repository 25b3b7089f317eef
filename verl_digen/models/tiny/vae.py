# SPDX-License-Identifier: Apache-2.0
"""A tiny `AutoencoderKL`, 8x8 px per latent position, as in SD3, FLUX.1 and Z-Image."""

from __future__ import annotations

from typing import Any

from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from verl_digen.models.tiny.weights import draw_weights

LATENT_CHANNELS = 4


def image_vae(scaling_factor: float, shift_factor: float) -> AutoencoderKL:
    blocks: dict[str, Any] = {  # annotated as tuples of one
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (8, 8, 16, 16),
    }
    vae = AutoencoderKL(
        **blocks,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    draw_weights(vae)
    return vae
