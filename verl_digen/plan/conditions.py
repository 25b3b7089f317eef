# SPDX-License-Identifier: Apache-2.0
"""Shapes of a prompt's condition, without a text encoder.

Invariant (tests/plan/test_conditions.py): the shapes are the same as from each model's own encoder.
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
    """Condition tensors of an architecture. Values are keys of the transformer's config."""

    width: str
    """Key of a token's width."""
    pooled: str | None = None
    """Key of the pooled vector's width; None: there is no pooled vector."""
    glyphs: str | None = None
    """Key of the width of a token of quoted text; None: not a separate input. The planned prompt quotes nothing."""


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
    """Zeros in the shapes of a prompt of `prompt_tokens` tokens.

    Args:
        prompt_tokens: not read if every prompt is padded to one length (FLUX.1, Stable Diffusion 3).
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
