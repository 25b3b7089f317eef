# SPDX-License-Identifier: Apache-2.0
"""Prompt encoding: one prompt at a time, without truncation.

- Prompts are encoded one by one, so that an embedding does not depend on the other prompts of the call
  (low-precision kernels differ with the batch's shape).
- diffusers' pipelines truncate a long prompt and log it; training on a prompt that the network does not see whole
  teaches the wrong thing, so it is an error here. (A CLIP encoder next to a larger one truncates, as in the pipeline.)

Invariants (tests/models): an embedding is the pipeline's; a prompt of one token too many is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from verl_digen.hardware.transfers import to_device
from verl_digen.inputs.images import PromptInputs
from verl_digen.models.loaded import PromptEncoder
from verl_digen.types import Condition

PROMPT_CHARACTERS_SHOWN = 40
"""Maximum number of a prompt's characters that an error quotes."""


def one_by_one(encode: Callable[[PromptInputs], Condition], *modules: nn.Module) -> PromptEncoder:
    """Turn an encoder of one prompt, which runs `modules`, into an encoder of several; it encodes each distinct prompt
    once."""

    # Not inference_mode: the embeddings enter autograd in training.
    @torch.no_grad()
    def encode_all(prompts: Sequence[PromptInputs]) -> list[Condition]:
        known = {prompt: encode(prompt) for prompt in dict.fromkeys(prompts)}
        return [known[prompt] for prompt in prompts]

    return PromptEncoder(encode_all, modules)


def text_encoder(encode: Callable[[str], Condition], *modules: nn.Module) -> PromptEncoder:
    """Turn an encoder of one text, which runs `modules`, into the encoder of a pipeline that reads no images."""
    return one_by_one(lambda inputs: encode(only_text(inputs)), *modules)


def only_text(inputs: PromptInputs) -> str:
    """The text of inputs without images.

    Raises:
        ValueError: there are images.
    """
    if inputs.images:
        raise ValueError(
            f"a prompt must have no images for a model that reads text alone, got {len(inputs.images)} for "
            f"{inputs.text[:PROMPT_CHARACTERS_SHOWN]!r}...; train a model that reads them, or rename the column "
            "'images'"
        )
    return inputs.text


def pad_embeds(embeds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """N tensors [L_i, D] -> ([N, L, D], padded with zeros to the longest; bool [N, L], False for padding)."""
    padded = pad_sequence(list(embeds), batch_first=True)
    lengths = torch.tensor([len(embed) for embed in embeds])
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    return padded, to_device(mask, padded.device)


def length_check(
    tokenizer: Any, *, title: str, max_tokens: int, wrap: Callable[[str], str] | None = None
) -> Callable[[str], None]:
    """Check that the encoder reads a whole prompt.

    Args:
        max_tokens: the limit, special tokens included.
        wrap: prompt -> text for the tokenizer, e.g. the prompt in a template.

    Returns:
        Function that raises ValueError for a prompt with more than `max_tokens` tokens.
    """
    in_template = "" if wrap is None or wrap("red") == "red" else " in its template"

    def check(prompt: str) -> None:
        text = prompt if wrap is None else wrap(prompt)
        num_tokens = len(tokenizer(text, verbose=False).input_ids)
        if num_tokens > max_tokens:
            raise ValueError(
                f"a prompt must have at most {max_tokens} tokens{in_template} for {title}, got {num_tokens} for "
                f"{prompt[:PROMPT_CHARACTERS_SHOWN]!r}...; shorten it in data.train_files or data.val_files"
            )

    return check
