# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen-Image-Edit and Qwen-Image-Edit-Plus: the tiny Qwen-Image, whose text encoder has a vision tower, and its
processor."""

from typing import Any

from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import QwenImageEditPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import QwenImageEditPlusPipeline
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from verl_digen.models.tiny import parts, qwen_image

MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
"""Special tokens around images, and in their place."""
CORPUS = [
    "system\nDescribe the key features of the input image (color, shape, size, texture, objects, background), then "
    "explain how the user's text instruction should alter or modify the image. Generate a new image that meets the "
    "user's requirements while maintaining consistency with the original input where appropriate.",
    "user\nPicture 1: ",
    "assistant\n",
    "make the small red circle two blue squares on a green background",
]
"""Training text of the tokenizer: the pipeline's prompt template, whose start it then splits into 64 tokens like the
real one, and an instruction."""


def edit_checkpoint(pipeline: Any, images: Qwen2VLImageProcessorPil | None = None) -> parts.WithProcessor:
    """The pipeline, with the part of its processor for pictures; `size` of that bounds the pixels that the language
    model reads."""
    return parts.WithProcessor(pipeline, {"processor": ("Qwen2VLProcessor", images or Qwen2VLImageProcessorPil())})


def make() -> parts.WithProcessor:
    """Build Qwen-Image-Edit-Plus: 3 MB."""
    return edit_checkpoint(QwenImageEditPlusPipeline(**_parts()))


def make_single() -> parts.WithProcessor:
    """Build the first Qwen-Image-Edit: 3 MB."""
    return edit_checkpoint(QwenImageEditPipeline(**_parts()))


def _parts() -> dict[str, Any]:
    tokenizer = parts.byte_tokenizer(CORPUS, [*parts.CHAT_TOKENS, *MARKS])
    return {
        "scheduler": qwen_image.make_scheduler(),
        "vae": qwen_image.make_vae(),
        "text_encoder": qwen_image.make_text_encoder(**mark_ids(tokenizer)),
        "tokenizer": tokenizer,
        "processor": tokenizer,  # its files are among the processor's
        "transformer": qwen_image.make_transformer(),
    }


def mark_ids(tokenizer: Any) -> dict[str, Any]:
    """Arguments of a text encoder's config."""
    names = ("vision_start", "vision_end", "image", "video")
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in zip(names, MARKS, strict=True)}
