# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-Edit-Plus (2509): text and one to three images to image, as diffusers' `QwenImageEditPlusPipeline`
runs it.

- Network, latents, schedule, guidance and decoding are those of Qwen-Image (`qwen_image.py`).
- The network reads the tokens of the picture, then those of every image of the prompt, each image at its own size
  (`Geometry.sources`), and its velocity at the first of them is that of the picture. All rows of a forward have one
  geometry, so these sizes are equal in it.
- The language model reads the images too, at about 384 x 384 px, in front of the text.
- Images are encoded with the prompt, once per content: packed latents of the VAE's most likely encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
    CONDITION_IMAGE_SIZE,
    QwenImageEditPlusPipeline,
    calculate_dimensions,
)
from PIL import Image
from torch import Tensor, nn
from transformers import Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.processing_utils import ProcessorMixin

from verl_digen.inputs import PromptInputs, fitted_size
from verl_digen.models.base import Collated, PromptCheck, PromptEncoder
from verl_digen.models.qwen_image import MAX_TEXT_TOKENS, QwenImage, conv_one_frame
from verl_digen.models.spec import ModelSpec
from verl_digen.models.text import length_check, one_by_one
from verl_digen.types import Condition, Geometry

MAX_IMAGES = 3
"""Images that the 2509 checkpoint was made for, says its model card."""
LABEL_TOKENS = 7
"""Tokens beside an image's own in the text, "Picture 1: " and the marks around the image."""
VISION_PATCH, VISION_MERGE = 14, 2
"""Pixels of a side that the vision tower reads as one patch, and patches of a side that become one token."""


class PictureProcessor(Qwen2VLProcessor):
    """transformers' processor without its part for videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class QwenImageEditPlus(QwenImage):
    spec: ModelSpec = replace(
        QwenImage.spec,
        title="Qwen-Image-Edit-Plus",
        example="Qwen/Qwen-Image-Edit-2509",
        components=(*QwenImage.spec.components, "processor"),
        num_images=(1, MAX_IMAGES),
        condition=replace(QwenImage.spec.condition, source="in_channels"),
        freed={"text_encoder": ("lm_head.",)},
        encodes_images=("encoder.", "quant_conv."),
        sequence=None,
        vllm_omni=None,
    )

    # -- loading ------------------------------------------------------------------------------------------
    def load_prompt_check(self) -> PromptCheck:
        """Load a check of the text alone; the tokens of images are not counted."""
        pipeline = self._load_pipeline(vae=None, text_encoder=None)
        limit = pipeline.prompt_template_encode_start_idx + MAX_TEXT_TOKENS
        wrap = pipeline.prompt_template_encode.format
        return length_check(pipeline.tokenizer, title=self.spec.title, max_tokens=limit, wrap=wrap)

    def load_encoder(self, dtype: torch.dtype, device: torch.device) -> PromptEncoder:
        """Conditions are {"embeds": [L, D], "source": [tokens of all images, channels]} in `dtype`, L that of text and
        images; without "source" for a text without images, of which there is none in a prompt file."""
        pipeline = self._load_pipeline(dtype={"default": dtype, "vae": self.decoder_dtype(dtype)})
        text_encoder, vae = pipeline.text_encoder, pipeline.vae
        text_encoder.lm_head = nn.Identity()
        vae.decoder = vae.post_quant_conv = nn.Identity()  # the decoder's own copy has them
        for module in vae.modules():
            if isinstance(module, QwenImageCausalConv3d):
                module.forward = partial(conv_one_frame, module)
        text_encoder.eval().to(device)
        vae.eval().to(device)
        check = self.load_prompt_check()

        def encode(inputs: PromptInputs) -> Condition:
            check(inputs.text)
            images = [image.read() for image in inputs.images]
            seen = [_at_vision_size(pipeline, image) for image in images]
            embeds, _ = pipeline.encode_prompt([inputs.text], image=seen or None, device=device)
            if not images:
                return {"embeds": embeds[0]}
            sources = [_encode_image(pipeline, image, inputs.image_px) for image in images]
            return {"embeds": embeds[0], "source": torch.cat(sources).to(dtype)}

        return one_by_one(encode, text_encoder, vae)

    def _load_pipeline(self, **parts: Any) -> Any:
        return QwenImageEditPlusPipeline.from_pretrained(
            self.path, transformer=None, scheduler=None, **self.pipeline_parts(), **parts
        )

    def pipeline_parts(self) -> dict[str, Any]:
        """The processor, which prepares images with PIL whether torchvision is installed or not."""
        images = Qwen2VLImageProcessorPil.from_pretrained(self.path / "processor")
        return {"processor": PictureProcessor(images, self.load_tokenizer("tokenizer"))}

    # -- the shape of the problem -------------------------------------------------------------------------
    def num_source_tokens(self, geometry: Geometry) -> int:
        return sum(rows * columns for rows, columns in self._source_grids(geometry))

    def num_image_text_tokens(self, geometry: Geometry) -> int:
        return sum(LABEL_TOKENS + _num_vision_tokens(height / width) for height, width in geometry.sources)

    def text_lengths(self, condition: Condition) -> tuple[int, ...]:
        return (len(condition["embeds"]),)

    def _source_grids(self, geometry: Geometry) -> list[tuple[int, int]]:
        """(rows, columns) of tokens of every image."""
        return [self._token_grid(Geometry(height, width)) for height, width in geometry.sources]

    # -- the network --------------------------------------------------------------------------------------
    def collate(self, conditions: Sequence[Condition]) -> Collated:
        """Batch as Qwen-Image does, with "source": [N, tokens of all images, channels] if there are images."""
        collated = super().collate(conditions)
        if "source" in conditions[0]:
            collated["source"] = torch.stack([condition["source"] for condition in conditions])
        return collated

    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # "6. Denoising loop" of QwenImageEditPlusPipeline.__call__.
        source = condition.get("source")
        num_given = 0 if source is None else source.shape[1]
        if num_given != self.num_source_tokens(geometry):
            raise RuntimeError(
                f"a condition must have {self.num_source_tokens(geometry)} tokens of images for {geometry}, got "
                f"{num_given}; encode its images with the `image_px` of its request"
            )
        joined = latents if source is None else torch.cat([latents, source.to(latents.dtype)], dim=1)
        return super().predict(transformer, joined, sigmas, condition, geometry)[:, : latents.shape[1]]

    def _image_shapes(self, geometry: Geometry) -> list[tuple[int, int, int]]:
        return [*super()._image_shapes(geometry), *((1, *grid) for grid in self._source_grids(geometry))]


def _num_vision_tokens(height_per_width: float) -> int:
    """Tokens of an image of this shape in the language model."""
    width, height = calculate_dimensions(CONDITION_IMAGE_SIZE, 1 / height_per_width)
    sides = smart_resize(height, width, factor=VISION_PATCH * VISION_MERGE)
    return sides[0] * sides[1] // (VISION_PATCH * VISION_MERGE) ** 2


def _at_vision_size(pipeline: Any, image: Image.Image) -> Image.Image:
    # "3. Preprocess image" of QwenImageEditPlusPipeline.__call__; so is the next function.
    width, height = calculate_dimensions(CONDITION_IMAGE_SIZE, image.width / image.height)
    return pipeline.image_processor.resize(image, height, width)


def _encode_image(pipeline: Any, image: Image.Image, image_px: int) -> Tensor:
    """[tokens, channels] packed latents of an image, in the VAE's dtype."""
    pixels = pipeline.image_processor.preprocess(image, *fitted_size(*image.size, image_px)).unsqueeze(2)
    latents = pipeline._encode_vae_image(pixels.to(pipeline.vae.device, pipeline.vae.dtype), None)
    return pipeline._pack_latents(latents, 1, latents.shape[1], *latents.shape[3:])[0]
