# SPDX-License-Identifier: Apache-2.0
"""The shapes of a prompt's condition, without a text encoder.

Invariant (tests/plan/test_conditions.py): those that each model's own encoder gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_digen.models import flux, sd3
from verl_digen.models.base import DiffusionModel
from verl_digen.types import Condition

CLIP_TOKENS = 77


@dataclass(frozen=True)
class ConditionLayout:
    """What an architecture reads of a prompt. Names are keys of the transformer's config."""

    width: str
    """Width of a token."""
    pooled: str | None = None
    """Width of the pooled vector, if there is one."""
    glyphs: str | None = None
    """Width of a token of quoted text, if that is read apart. The planned prompt quotes nothing."""


LAYOUTS = {
    "FluxTransformer2DModel": ConditionLayout("joint_attention_dim", "pooled_projection_dim"),
    "HunyuanVideo15Transformer3DModel": ConditionLayout("text_embed_dim", glyphs="text_embed_2_dim"),
    "HunyuanVideoTransformer3DModel": ConditionLayout("text_embed_dim", "pooled_projection_dim"),
    "QwenImageTransformer2DModel": ConditionLayout("joint_attention_dim"),
    "SD3Transformer2DModel": ConditionLayout("joint_attention_dim", "pooled_projection_dim"),
    "WanTransformer3DModel": ConditionLayout("text_dim"),
    "ZImageTransformer2DModel": ConditionLayout("cap_feat_dim"),
}
"""Architecture -> layout. A new model adds a line."""


def empty_condition(model: DiffusionModel, prompt_tokens: int) -> Condition:
    """Zeros of the shapes that a prompt of so many tokens has.

    Args:
        prompt_tokens: not read where every prompt is padded to one length (FLUX.1, Stable Diffusion 3).
    """
    layout, config = LAYOUTS[model.architecture], model.read_network_config(model.experts[0])
    condition = {"embeds": torch.zeros(_num_tokens(model, prompt_tokens), config[layout.width])}
    if layout.pooled is not None:
        condition["pooled"] = torch.zeros(config[layout.pooled])
    if layout.glyphs is not None:
        condition["glyphs"] = torch.zeros(0, config[layout.glyphs])
    return condition


def _num_tokens(model: DiffusionModel, prompt_tokens: int) -> int:
    if isinstance(model, flux.Flux):
        is_dev = model.default_embedded_guidance is not None
        return flux.MAX_TEXT_TOKENS_DEV if is_dev else flux.MAX_TEXT_TOKENS_SCHNELL
    if isinstance(model, sd3.StableDiffusion3):
        return CLIP_TOKENS + sd3.MAX_TEXT_TOKENS
    return prompt_tokens
