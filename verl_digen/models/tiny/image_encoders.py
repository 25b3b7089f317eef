# SPDX-License-Identifier: Apache-2.0
"""Tiny vision encoders with random weights, and their processors, which need PIL alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from verl_digen.models.tiny.weights import drawn

CLIP_WIDTH, SIGLIP_WIDTH = 20, 16
SIDE_PX, PATCH_PX = 28, 14
"""Side of the picture that an encoder sees, and of one token of it."""


@dataclass(frozen=True)
class WithProcessor:
    """A pipeline without its image processor, which diffusers makes with torchvision alone, and that processor."""

    pipeline: Any
    processors: Mapping[str, tuple[str, Any]]
    """Folder -> (its class with torchvision, processor that needs none)."""

    def save_pretrained(self, path: str | Path) -> None:
        """Write the checkpoint as the pipeline of a machine with torchvision does."""
        self.pipeline.save_pretrained(path)
        index = Path(path) / "model_index.json"
        parts = json.loads(index.read_text())
        for folder, (name, processor) in self.processors.items():
            processor.save_pretrained(Path(path) / folder)
            parts[folder] = ["transformers", name]
        index.write_text(json.dumps(parts, indent=2))


def clip_vision() -> CLIPVisionModel:
    return drawn(
        CLIPVisionModel,
        CLIPVisionConfig(
            hidden_size=CLIP_WIDTH,
            intermediate_size=2 * CLIP_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=SIDE_PX,
            patch_size=PATCH_PX,
        ),
    )


def clip_vision_processor() -> CLIPImageProcessorPil:
    return CLIPImageProcessorPil(
        size={"shortest_edge": SIDE_PX},
        crop_size={"height": SIDE_PX, "width": SIDE_PX},  # type: ignore[arg-type]
    )


def siglip_vision() -> SiglipVisionModel:
    return drawn(
        SiglipVisionModel,
        SiglipVisionConfig(
            hidden_size=SIGLIP_WIDTH,
            intermediate_size=2 * SIGLIP_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=SIDE_PX,
            patch_size=PATCH_PX,
        ),
    )


def siglip_processor() -> SiglipImageProcessorPil:
    return SiglipImageProcessorPil(size={"height": SIDE_PX, "width": SIDE_PX})  # type: ignore[arg-type]
