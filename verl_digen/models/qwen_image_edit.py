# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-Edit-Plus (2509): text and one to three images to image, as diffusers' `QwenImageEditPlusPipeline` runs
it; all else is as in `qwen_image.py`.

The network reads the tokens of the picture, then of every image of the prompt (`sources.py`). The language model reads
the images too, at about 384 x 384 px, in front of the text.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE, calculate_dimensions
from PIL import Image
from torch import Tensor
from transformers import Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from verl_digen.inputs.images import PromptInputs
from verl_digen.inputs.sizes import fitted_size
from verl_digen.models.base import EncodePrompt
from verl_digen.models.qwen_image import QwenImage, take_one_frame
from verl_digen.models.sources import ReadsImages
from verl_digen.models.spec import ModelSpec, VllmOmniServing
from verl_digen.types import Condition, Geometry

MARK_TOKENS = 2
"""Tokens beside an image's own in the text: the marks around it."""
MAX_IMAGES = 3
"""Images that the 2509 checkpoint was made for, says its model card."""
LABEL_TOKENS = 7
"""Tokens beside an image's own in the text, "Picture 1: " and the marks around the image."""
VISION_MERGE = 2
"""Patches of a side that the vision tower makes one token of."""


class PicturesAlone:
    """Constructor of a processor of transformers, the next base, without a part for videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)  # type: ignore[arg-type]


class PictureProcessor(PicturesAlone, Qwen2VLProcessor):
    """Pictures and text for the language model."""

    def __call__(self, images: Any = None, text: Any = None, **arguments: Any) -> Any:
        """Run transformers' method; for a text without images their entries are None, as pipelines read them."""
        inputs = super().__call__(images=images, text=text, **arguments)
        return inputs if images else type(inputs)({"pixel_values": None, "image_grid_thw": None, **inputs})


class QwenImageEditPlus(ReadsImages, QwenImage):
    spec: ModelSpec = replace(
        QwenImage.spec,
        title="Qwen-Image-Edit-Plus",
        example="Qwen/Qwen-Image-Edit-2509",
        components=(*QwenImage.spec.components, "processor"),
        num_images=(1, MAX_IMAGES),
        image_sizes="qwen_image_edit",
        freed={"text_encoder": ("lm_head.",)},
        encodes_images=("encoder.", "quant_conv."),
        vllm_omni=VllmOmniServing(pipeline="QwenImageEditPlusPipeline", mixin=".edit_pipelines:EditPlusRecording"),
    )

    # -- loading ------------------------------------------------------------------------------------------
    def load_pipeline(self, dtype: torch.dtype, *without: str) -> Any:
        pipeline = super().load_pipeline(dtype, *without)
        if "vae" not in without:
            take_one_frame(pipeline.vae)
        return pipeline

    def encode_with(self, pipeline: Any, encode_prompt: EncodePrompt, inputs: PromptInputs) -> Condition:
        """Encode into {"embeds": [L, D], "source": [tokens of all images, channels]}, L of text and images; without
        "source" for a text without images, of which there is none in a prompt file."""
        self.check_images(inputs)
        images = [image.read() for image in inputs.images]
        seen = [self._as_seen(pipeline, image, inputs.image_px) for image in images]
        condition = {"embeds": encode_prompt([inputs.text], image=seen or None)[0][0]}
        if images:
            condition["source"] = torch.cat([_encode_image(pipeline, image, inputs.image_px) for image in images])
        return condition

    def _as_seen(self, pipeline: Any, image: Image.Image, image_px: int) -> Image.Image:
        """Return an image at the size at which the language model reads it. `image_px`: side of the square whose area
        the network reads it at."""
        # "3. Preprocess image" of QwenImageEditPlusPipeline.__call__; so is `_encode_image`.
        width, height = calculate_dimensions(CONDITION_IMAGE_SIZE, image.width / image.height)
        return pipeline.image_processor.resize(image, height, width)

    def pipeline_parts(self) -> dict[str, Any]:
        """The processor, which prepares images with PIL whether torchvision is installed or not."""
        return {"processor": PictureProcessor(self._vision, self.load_tokenizer("tokenizer"))}

    # -- the shape of the problem -------------------------------------------------------------------------
    def num_image_text_tokens(self, geometry: Geometry) -> int:
        return sum(LABEL_TOKENS + self._num_seen_tokens(height / width) for height, width in geometry.sources)

    def _num_seen_tokens(self, height_per_width: float) -> int:
        """Tokens of an image of this shape in the language model."""
        width, height = calculate_dimensions(CONDITION_IMAGE_SIZE, 1 / height_per_width)
        return self._vision.get_number_of_image_patches(height, width, {}) // VISION_MERGE**2

    @cached_property
    def _vision(self) -> Any:
        """The checkpoint's image processor, which bounds the size at which the language model reads an image."""
        return Qwen2VLImageProcessorPil.from_pretrained(self.path / "processor")

    # -- the network --------------------------------------------------------------------------------------
    def _image_shapes(self, geometry: Geometry) -> list[tuple[int, int, int]]:
        sources = [(1, *self._token_grid(Geometry(height, width))) for height, width in geometry.sources]
        return [*super()._image_shapes(geometry), *sources]


def _encode_image(pipeline: Any, image: Image.Image, image_px: int) -> Tensor:
    """[tokens, channels] packed latents of an image, in the VAE's dtype."""
    pixels = pipeline.image_processor.preprocess(image, *fitted_size(*image.size, image_px**2)).unsqueeze(2)
    latents = pipeline._encode_vae_image(pixels.to(pipeline.vae.device, pipeline.vae.dtype), None)
    return pipeline._pack_latents(latents, 1, latents.shape[1], *latents.shape[3:])[0]


class QwenImageEdit(QwenImageEditPlus):
    """Qwen-Image-Edit, the first one, as diffusers' `QwenImageEditPipeline` runs it, with two differences: a prompt has
    exactly one image, whose place is in the prompt's template, and the language model reads it at the size at which the
    network does."""

    spec: ModelSpec = replace(
        QwenImageEditPlus.spec,
        title="Qwen-Image-Edit",
        example="Qwen/Qwen-Image-Edit",
        num_images=(1, 1),
        vllm_omni=VllmOmniServing(pipeline="QwenImageEditPipeline", mixin=".edit_pipelines:EditRecording"),
    )

    def num_image_text_tokens(self, geometry: Geometry) -> int:
        patches = [self._vision.get_number_of_image_patches(*source, {}) for source in geometry.sources]
        return sum(MARK_TOKENS + of_image // VISION_MERGE**2 for of_image in patches)

    def _as_seen(self, pipeline: Any, image: Image.Image, image_px: int) -> Image.Image:
        # "3. Preprocess image" of QwenImageEditPipeline.__call__.
        return pipeline.image_processor.resize(image, *fitted_size(*image.size, image_px**2))
