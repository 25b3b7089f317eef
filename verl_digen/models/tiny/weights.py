# SPDX-License-Identifier: Apache-2.0
"""Random weights that make a tiny network sensitive to all its inputs: no weight keeps a constructor's zeros, which
would hide the effect of earlier layers."""

from __future__ import annotations

from typing import Any, TypeVar

from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def draw_weights(module: nn.Module, gain: float = 1.0) -> None:
    """Draw matrices with std gain/sqrt(fan_in), biases with std 0.3, norm weights around 1."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1 and "gamma" not in name:
            nn.init.normal_(parameter, std=gain / parameter[0].numel() ** 0.5)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
        else:
            nn.init.normal_(parameter, mean=1.0, std=0.1)


def drawn(kind: type[Module], *config: Any, **sizes: Any) -> Module:
    """Make a network of these sizes, or of a config, and draw its weights."""
    module = kind(*config, **sizes)
    draw_weights(module)
    return module


LATENT_CHANNELS = 4


def image_vae(scaling_factor: float, shift_factor: float) -> AutoencoderKL:
    """Make a tiny `AutoencoderKL`, 8x8 px per latent position, as in SD3, FLUX.1 and Z-Image."""
    return drawn(
        AutoencoderKL,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
