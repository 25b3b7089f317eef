# SPDX-License-Identifier: Apache-2.0
"""Tiny Wan2.1, Wan2.2 A14B and TI2V-5B: 5 frames of 64x64 px are latents [4, 2, 8, 8], or [4, 2, 4, 4] for 5B."""

from typing import Any

from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

from verl_digen.models.tiny import parts

OUTPUT_GAIN = 0.5
"""Gain of the last layer: keeps fp32 rounding errors well below the effects of the rest of the network."""
BOUNDARY_RATIO = 0.875
"""Boundary between the experts of the published A14B."""
TI2V_FLOW_SHIFT = 5.0


def make_2_1() -> WanPipeline:
    """Build Wan2.1: 1 MB."""
    return _make(flow_shift=3.0, vae=make_vae())


def make_2_2_a14b() -> WanPipeline:
    """Build Wan2.2 A14B: 2 MB; two experts."""
    return _make(flow_shift=3.0, vae=make_vae(), transformer_2=make_transformer(), boundary_ratio=BOUNDARY_RATIO)


def make_2_2_ti2v_5b() -> WanPipeline:
    """Build Wan2.2 TI2V-5B: 1 MB; the VAE with a spatial factor of 16, and a timestep per token."""
    return _make(flow_shift=TI2V_FLOW_SHIFT, vae=make_ti2v_vae(), expand_timesteps=True)


def _make(flow_shift: float, vae: AutoencoderKLWan, **more: Any) -> WanPipeline:
    return WanPipeline(
        tokenizer=parts.t5_tokenizer(),
        text_encoder=parts.umt5_encoder(),
        vae=vae,
        scheduler=make_scheduler(flow_shift),
        transformer=make_transformer(),
        **more,
    )


def make_scheduler(flow_shift: float) -> Any:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift)


def make_transformer(**more: Any) -> WanTransformer3DModel:
    """Build the network; `more` replaces or adds arguments."""
    sizes: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": parts.LATENT_CHANNELS,
        "out_channels": parts.LATENT_CHANNELS,
        "text_dim": parts.TEXT_WIDTH,
        "freq_dim": 32,
        "ffn_dim": 48,
        "num_layers": 2,
        "rope_max_seq_len": 64,
    }
    transformer = WanTransformer3DModel(**sizes | more)
    parts.draw_weights(transformer)
    parts.draw_weights(transformer.proj_out, gain=OUTPUT_GAIN)
    return transformer


def make_vae(**more: Any) -> AutoencoderKLWan:
    return parts.drawn(AutoencoderKLWan, dim_mult=[1, 1, 1, 1], **parts.CAUSAL_VAE, **more)


def make_ti2v_vae() -> AutoencoderKLWan:
    """Build TI2V-5B's VAE, with a spatial factor of 16."""
    return make_vae(is_residual=True, in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=16)
