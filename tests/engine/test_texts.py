# SPDX-License-Identifier: Apache-2.0
"""Order of samples by their texts, and how much of what the network reads is padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engine.harness import SAMPLING
from verl_digen.engine.texts import padded_tokens, text_order
from verl_digen.models.qwen_image import QwenImage
from verl_digen.models.wan import Wan
from verl_digen.types import Condition, Noised, TrainingRows


def condition(length: int) -> Condition:
    return {"embeds": torch.zeros(length, 2)}


@pytest.mark.parametrize(
    ("scale", "takes_masks", "expected"),
    [(1.0, True, (80, 10)), (3.0, True, (160, 80)), (3.0, False, (90, 10))],
    ids=["alone", "guided", "guided in two forwards"],
)
def test_padding_is_counted_over_the_texts_of_each_forward(scale: float, takes_masks: bool, expected: tuple[int, int]):
    """Prompts of 40 and 30 tokens; negative prompts of 5, which are read with guidance alone."""
    model = object.__new__(QwenImage)
    model.takes_masks = takes_masks
    nothing = torch.zeros(2)
    rows = TrainingRows(
        latents=nothing,
        sigmas=nothing,
        point=object.__new__(Noised),
        conditions=[condition(40), condition(30)],
        negative_conditions=[condition(5), condition(5)],
        advantages=nothing,
        mask=nothing,
        sampling=replace(SAMPLING, true_cfg_scale=scale),
    )
    assert padded_tokens(model, rows) == expected


def test_the_longest_text_of_a_sample_comes_first():
    model = object.__new__(QwenImage)
    assert text_order(model, (condition(5), condition(40))) == (40, 5, 40)
    assert text_order(object.__new__(Wan), (condition(5), condition(40))) == (), "the network reads 512 tokens of each"
