# SPDX-License-Identifier: Apache-2.0
"""A tiny HunyuanVideo 1.5 for image to video: the tiny one for text, and SigLIP."""

from __future__ import annotations

from typing import Any

from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5_image2video import (
    HunyuanVideo15ImageToVideoPipeline,
)

from verl_digen.models.tiny.hunyuan_video15 import make_others, make_transformer
from verl_digen.models.tiny.image_encoders import SIGLIP_WIDTH, WithProcessor, siglip_processor, siglip_vision


def make() -> WithProcessor:
    """Build the pipeline: 25 MB."""
    processor: Any = siglip_processor()
    pipeline = HunyuanVideo15ImageToVideoPipeline(
        transformer=make_transformer(task_type="i2v", image_embed_dim=SIGLIP_WIDTH),
        image_encoder=siglip_vision(),
        feature_extractor=processor,
        **make_others(),
    )
    return WithProcessor(pipeline, {"feature_extractor": processor})
