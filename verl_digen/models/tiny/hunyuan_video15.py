# SPDX-License-Identifier: Apache-2.0
"""A tiny HunyuanVideo 1.5, and one for image to video: 5 frames of 64x64 px are latents [4, 2, 4, 4]."""

from typing import Any

from diffusers.guiders.classifier_free_guidance import ClassifierFreeGuidance
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import AutoencoderKLHunyuanVideo15
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15Transformer3DModel
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5_image2video import (
    HunyuanVideo15ImageToVideoPipeline,
)
from transformers import ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

from verl_digen.models.hunyuan_video15 import SYSTEM_MESSAGE
from verl_digen.models.tiny import parts


def make() -> HunyuanVideo15Pipeline:
    """Build the pipeline: 25 MB, because the width of the glyph projection is fixed in the class; the published
    schedule and guider."""
    return HunyuanVideo15Pipeline(transformer=_transformer(task_type="t2v"), **_others())


def make_i2v() -> parts.WithProcessor:
    """Build the pipeline for image to video: 25 MB."""
    processor: Any = parts.siglip_processor()
    pipeline = HunyuanVideo15ImageToVideoPipeline(
        transformer=_transformer(task_type="i2v", image_embed_dim=parts.SIGLIP_WIDTH),
        image_encoder=parts.siglip_vision(),
        feature_extractor=processor,
        **_others(),
    )
    return parts.WithProcessor(pipeline, {"feature_extractor": ("SiglipImageProcessor", processor)})


def _others() -> dict[str, Any]:
    """Parts besides the network."""
    return {
        "text_encoder": parts.drawn(
            Qwen2_5_VLTextModel, Qwen2_5_VLTextConfig(**parts.QWEN_VL_TEXT, num_hidden_layers=4)
        ),
        # trained on these words, the template's beginning has 108 tokens, as with the real tokenizer: the cropped part
        "tokenizer": parts.chat_tokenizer(f"system\n{SYSTEM_MESSAGE}"),
        "vae": parts.drawn(
            AutoencoderKLHunyuanVideo15,
            latent_channels=parts.LATENT_CHANNELS,
            block_out_channels=(8, 8, 8, 8, 8),
            layers_per_block=1,
            scaling_factor=1.03682,
        ),
        "scheduler": parts.FlowScheduler(shift=5.0),
        "text_encoder_2": parts.t5_encoder(),
        "tokenizer_2": ByT5Tokenizer(),
        "guider": ClassifierFreeGuidance(guidance_scale=6.0),
    }


def _transformer(**more: Any) -> HunyuanVideo15Transformer3DModel:
    return parts.drawn(
        HunyuanVideo15Transformer3DModel,
        in_channels=2 * parts.LATENT_CHANNELS + 1,
        out_channels=parts.LATENT_CHANNELS,
        **parts.TWO_HEADS,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=parts.TEXT_WIDTH,
        text_embed_2_dim=parts.TEXT_WIDTH,
        rope_axes_dim=(4, 6, 6),
        **more,
    )
