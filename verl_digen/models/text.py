# SPDX-License-Identifier: Apache-2.0
"""Prompt encoding: one prompt at a time, without truncation.

Prompts are encoded one by one, so that an embedding does not depend on the other prompts of the call (low-precision
kernels differ with the batch's shape). diffusers' pipelines truncate a long prompt and log it; training on a prompt
that the network does not see whole teaches the wrong thing, so it is an error here. (A CLIP encoder next to a larger
one truncates, as in the pipeline.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from verl_digen.hardware.transfers import to_device
from verl_digen.inputs.images import PromptInputs
from verl_digen.types import Condition

PROMPT_CHARACTERS_SHOWN = 40
"""Maximum number of a prompt's characters that an error quotes."""


@dataclass(frozen=True)
class PromptEncoder:
    """Texts, with images where the pipeline reads them -> one condition each, on the encoder's device."""

    encode: Callable[[Sequence[PromptInputs]], list[Condition]]
    modules: tuple[nn.Module, ...]

    def __call__(self, prompts: Sequence[PromptInputs]) -> list[Condition]:
        return self.encode(prompts)


def one_by_one(
    encode: Callable[[PromptInputs], Condition], check: Callable[[str], None], device: torch.device, *modules: Any
) -> PromptEncoder:
    """Turn an encoder of one prompt into an encoder of several, which checks and encodes each distinct prompt once.
    `modules`: networks that it runs; they move to `device`."""
    for module in modules:
        module.eval().to(device)

    # Not inference_mode: the embeddings enter autograd in training.
    @torch.no_grad()
    def encode_all(prompts: Sequence[PromptInputs]) -> list[Condition]:
        known: dict[PromptInputs, Condition] = {}
        for prompt in dict.fromkeys(prompts):
            check(prompt.text)
            known[prompt] = encode(prompt)
        return [known[prompt] for prompt in prompts]

    return PromptEncoder(encode_all, modules)


def only_text(inputs: PromptInputs) -> str:
    """The text of inputs without images. ValueError if there are images."""
    if inputs.images:
        raise ValueError(
            f"a prompt must have no images for a model that reads text alone, got {len(inputs.images)} for "
            f"{inputs.text[:PROMPT_CHARACTERS_SHOWN]!r}...; train a model that reads them, or rename the column "
            "'images'"
        )
    return inputs.text


def padded(conditions: Sequence[Condition], name: str) -> dict[str, Tensor]:
    """N tensors [L_i, D] as `name`: [N, L, D], padded with zeros to the longest; and, if lengths differ (attention is
    faster without), `name`_mask: bool [N, L], False for padding."""
    joined = pad_sequence([condition[name] for condition in conditions], batch_first=True)
    lengths = torch.tensor([len(condition[name]) for condition in conditions])
    if bool((lengths == joined.shape[1]).all()):
        return {name: joined}
    mask = torch.arange(joined.shape[1]) < lengths[:, None]
    return {name: joined, f"{name}_mask": to_device(mask, joined.device)}


def stacked(conditions: Sequence[Condition], *names: str) -> dict[str, Tensor]:
    """The tensors of these names, of one shape in all conditions, each [N, ...]; those that they have."""
    known = [name for name in names if name in conditions[0]]
    return {name: torch.stack([condition[name] for condition in conditions]) for name in known}


def chat_text(tokenizer: Any, *, enable_thinking: bool) -> Callable[[str], str]:
    """Function that puts a prompt into the tokenizer's chat template, as the user's only message."""

    def wrap(prompt: str) -> str:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=enable_thinking,
        )

    return wrap


def length_check(
    tokenizer: Any, *, title: str, max_tokens: int, wrap: Callable[[str], str] | None = None
) -> Callable[[str], None]:
    """Function that raises ValueError for a prompt that the encoder does not read whole: one of more than `max_tokens`,
    special tokens included. `wrap`: prompt -> text for the tokenizer, e.g. the prompt in a template."""
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
