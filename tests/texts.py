# SPDX-License-Identifier: Apache-2.0
"""Prompts without images, as tests write them: plain texts."""

from collections.abc import Callable, Sequence

from verl_digen.inputs.images import PromptInputs
from verl_digen.models.base import PromptEncoder
from verl_digen.types import Condition

TextEncoder = Callable[[Sequence[str]], list[Condition]]


def of_texts(encode: PromptEncoder) -> TextEncoder:
    """Turn the encoder into a function of texts."""
    return lambda texts: encode([PromptInputs(text) for text in texts])
