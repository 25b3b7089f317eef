# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-Edit, the first one: text and one image to image, as diffusers' `QwenImageEditPipeline` runs it.

Two differences to its successor (`qwen_image_edit.py`): a prompt has exactly one image, whose place is in the prompt's
template, and the language model reads it at the size at which the network does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import QwenImageEditPipeline
from PIL import Image

from verl_digen.image_sizes import fitted_size
from verl_digen.models.qwen_image_edit import VISION_MERGE, QwenImageEditPlus
from verl_digen.models.spec import ModelSpec, VllmOmniServing
from verl_digen.types import Geometry

MARK_TOKENS = 2
"""Tokens beside an image's own in the text: the marks around it."""


class QwenImageEdit(QwenImageEditPlus):
    pipeline_class = QwenImageEditPipeline
    spec: ModelSpec = replace(
        QwenImageEditPlus.spec,
        title="Qwen-Image-Edit",
        example="Qwen/Qwen-Image-Edit",
        num_images=(1, 1),
        vllm_omni=VllmOmniServing(
            pipeline="QwenImageEditPipeline", mixin="verl_digen.rollout.vllm_omni.edit_pipelines:EditRecording"
        ),
    )

    def num_image_text_tokens(self, geometry: Geometry) -> int:
        patches = [self._vision.get_number_of_image_patches(*source, {}) for source in geometry.sources]
        return sum(MARK_TOKENS + of_image // VISION_MERGE**2 for of_image in patches)

    def _as_seen(self, pipeline: Any, image: Image.Image, image_px: int) -> Image.Image:
        # "3. Preprocess image" of QwenImageEditPipeline.__call__.
        return pipeline.image_processor.resize(image, *fitted_size(*image.size, image_px))
