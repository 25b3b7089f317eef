# SPDX-License-Identifier: Apache-2.0
"""Tiny Wan2.1, Wan2.2 A14B and TI2V-5B for image to video: those for text with channels for an image and Wan2.1's CLIP,
and that for text as `WanImageToVideoPipeline` saves it."""

from typing import Any

from diffusers.pipelines.wan.pipeline_wan_i2v import WanImageToVideoPipeline

from verl_digen.models.tiny import parts
from verl_digen.models.tiny.wan import TI2V_FLOW_SHIFT, make_scheduler, make_ti2v_vae, make_transformer, make_vae

MASK_CHANNELS = 4
"""Channels of the mask: frames that the VAE puts into one."""
IN_CHANNELS = 2 * parts.LATENT_CHANNELS + MASK_CHANNELS
BOUNDARY_RATIO = 0.9
"""Boundary between the experts of the published I2V-A14B."""


def make_2_1() -> parts.WithProcessor:
    """Build Wan2.1: 1 MB."""
    network = make_transformer(in_channels=IN_CHANNELS, image_dim=parts.CLIP_WIDTH, added_kv_proj_dim=24)
    processor = "CLIPImageProcessor", parts.clip_vision_processor()
    return parts.WithProcessor(_make(network, image_encoder=parts.clip_vision()), {"image_processor": processor})


def make_2_2_a14b() -> WanImageToVideoPipeline:
    """Build Wan2.2 A14B: 2 MB; two experts."""
    first, second = (make_transformer(in_channels=IN_CHANNELS) for _ in range(2))
    return _make(first, transformer_2=second, boundary_ratio=BOUNDARY_RATIO)


def make_2_2_ti2v_5b() -> WanImageToVideoPipeline:
    """Build Wan2.2 TI2V-5B: 1 MB; the first frame is given, with a timestep per token."""
    return _make(
        make_transformer(), vae=make_ti2v_vae(), scheduler=make_scheduler(TI2V_FLOW_SHIFT), expand_timesteps=True
    )


def _make(transformer: Any, **more: Any) -> WanImageToVideoPipeline:
    own = {"vae": make_vae, "scheduler": lambda: make_scheduler(3.0)}
    return WanImageToVideoPipeline(
        tokenizer=parts.t5_tokenizer(),
        text_encoder=parts.umt5_encoder(),
        transformer=transformer,
        **{name: make() for name, make in own.items() if name not in more},
        **more,
    )
