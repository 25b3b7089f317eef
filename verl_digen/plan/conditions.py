# SPDX-License-Identifier: Apache-2.0
"""Shapes of a prompt's condition, without a text encoder.

Invariant (tests/plan/test_conditions.py): the shapes are the same as from each model's own encoder.
"""

from __future__ import annotations

import torch

from verl_digen.models.base import DiffusionModel
from verl_digen.types import Condition


def empty_condition(model: DiffusionModel, prompt_tokens: int) -> Condition:
    """Zeros in the shapes of a prompt of `prompt_tokens` tokens that quotes no text.

    Args:
        prompt_tokens: not read if every prompt is padded to one length (FLUX.1, Stable Diffusion 3).
    """
    layout, config = model.spec.condition, model.read_network_config(model.experts[0])
    num_tokens = prompt_tokens if layout.num_tokens is None else layout.num_tokens
    condition = {"embeds": torch.zeros(num_tokens, config[layout.width])}
    if layout.pooled is not None:
        condition["pooled"] = torch.zeros(config[layout.pooled])
    if layout.glyphs is not None:
        condition["glyphs"] = torch.zeros(0, config[layout.glyphs])
    return condition
