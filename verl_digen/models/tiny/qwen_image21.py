# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen-Image-2.1: 16x16 px per latent position, so 64x64 px are latents [16, 4]."""

from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import AutoencoderKLQwenImage21
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Transformer2DModel
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import QwenImage21Pipeline
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from verl_digen.models.qwen_image21 import PictureProcessor
from verl_digen.models.tiny import parts
from verl_digen.models.tiny.qwen_image import make_scheduler
from verl_digen.models.tiny.qwen_image_edit import MARKS, mark_ids

SYSTEM = "system\nComprehend and analyze the provided prompt."
"""Training text of the tokenizer: the start of the pipeline's prompt template."""
LABELS = "user\n<image1> <image2> <image3>"
"""Training text, too: the text in front of images."""
CHAT_TEMPLATE = parts.CHAT_TEMPLATE.replace("message.content", "message.content[0].text")


def make() -> parts.WithProcessor:
    """Build the pipeline: 3 MB; the schedule of Qwen-Image."""
    tokenizer = parts.byte_tokenizer([SYSTEM, LABELS, "assistant\n", *parts.CORPUS], [*parts.CHAT_TOKENS, *MARKS])
    images = Qwen2VLImageProcessorPil(
        patch_size=16,
        size={"shortest_edge": 32**2, "longest_edge": 16777216},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    processor = PictureProcessor(images, tokenizer, CHAT_TEMPLATE)
    pipeline = QwenImage21Pipeline(
        scheduler=make_scheduler(),
        vae=parts.drawn(
            AutoencoderKLQwenImage21, **{**parts.CAUSAL_VAE, "decoder_base_dim": 8, "dim_mult": [1, 1, 2, 2, 2]}
        ),
        text_encoder=parts.drawn(
            Qwen3VLForConditionalGeneration,
            Qwen3VLConfig(
                text_config={
                    **parts.LANGUAGE_MODEL,
                    **{"num_hidden_layers": 2, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 0},
                    "rope_parameters": {
                        **{"rope_type": "default", "rope_theta": 5e6},
                        **{"mrope_section": [4, 2, 2], "mrope_interleaved": True},
                    },
                },
                vision_config={
                    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
                    **{"out_hidden_size": parts.TEXT_WIDTH, "deepstack_visual_indexes": [0]},
                    "num_position_embeddings": 16,
                },
                **mark_ids(tokenizer),
            ),
        ),
        processor=processor,
        transformer=parts.drawn(
            QwenImage21Transformer2DModel,
            in_channels=parts.LATENT_CHANNELS,
            out_channels=parts.LATENT_CHANNELS,
            num_layers=2,
            **parts.TWO_HEADS,
            context_in_dim=parts.TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
    )
    return parts.WithProcessor(pipeline, {"processor": ("Qwen3VLProcessor", processor)})
