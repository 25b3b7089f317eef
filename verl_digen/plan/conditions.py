# SPDX-License-Identifier: Apache-2.0
"""Shapes of a prompt's condition, without a text encoder.

Invariant (tests/plan/test_conditions.py): the shapes are the same as from each model's own encoder.
"""

from __future__ import annotations

import torch

from verl_digen.models.base import DiffusionModel
from verl_digen.types import Condition, Geometry


def empty_condition(model: DiffusionModel, prompt_tokens: int, geometry: Geometry) -> Condition:
    """Zeros in the shapes of a prompt of `prompt_tokens` tokens that quotes no text.

    Args:
        prompt_tokens: of the text; those of its images (`geometry.sources`) are added. Not read if every prompt is
            padded to one length (FLUX.1, Stable Diffusion 3).
    """
    layout, config = model.spec.condition, model.read_network_config(model.experts[0])
    with_images = prompt_tokens + model.num_image_text_tokens(geometry)
    num_tokens = with_images if layout.num_tokens is None else layout.num_tokens
    condition = {"embeds": torch.zeros(num_tokens, config[layout.width])}
    if layout.pooled is not None:
        condition["pooled"] = torch.zeros(config[layout.pooled])
    if layout.glyphs is not None:
        condition["glyphs"] = torch.zeros(0, config[layout.glyphs])
    if layout.audio is not None:
        condition["audio"] = torch.zeros(num_tokens, config[layout.audio])
    if geometry.sources:
        condition |= {name: torch.zeros(shape) for name, shape in model.image_conditions(geometry).items()}
    return condition
