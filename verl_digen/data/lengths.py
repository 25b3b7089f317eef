# SPDX-License-Identifier: Apache-2.0
"""Prompts that are longer than the model reads: found, and dropped where the user asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from verl_digen.types import PromptRow

SURELY_SHORT_BYTES = 200
"""A prompt this long fits every model: a token is a byte or more, and none reads fewer than 256. (Eight quotations in
one can be too much for HunyuanVideo 1.5, whose encoder then says so.)"""

PromptCheck = Callable[[str], None]
"""Raises ValueError for a text that is longer than the model reads."""


@dataclass(frozen=True)
class TooLong:
    """A prompt that the model would not read to its end."""

    prompt: PromptRow
    reason: str


def find_too_long(prompts: Iterable[PromptRow], load_check: Callable[[], PromptCheck]) -> list[TooLong]:
    """The prompts that are too long, or have a negative prompt that is.

    Args:
        load_check: called at most once, and only if a prompt is not surely short: it loads tokenizers.
    """
    found: list[TooLong] = []
    reasons: dict[str, str] = {}
    check: PromptCheck | None = None
    for prompt in prompts:
        texts = [prompt.text] if prompt.negative is None else [prompt.text, prompt.negative]
        for text in texts:
            if len(text.encode()) <= SURELY_SHORT_BYTES:
                continue
            if text not in reasons:
                check = check or load_check()
                reasons[text] = _reason(text, check)
            if reasons[text]:
                found.append(TooLong(prompt, reasons[text]))
                break
    return found


def without(prompts: Sequence[PromptRow], too_long: Sequence[TooLong]) -> list[PromptRow]:
    """Prompts that are not too long."""
    dropped = {id(one.prompt) for one in too_long}
    return [prompt for prompt in prompts if id(prompt) not in dropped]


def describe_dropped(key: str, too_long: Sequence[TooLong], num_prompts: int) -> str:
    """One sentence on the prompts of `key` that were dropped, the first of them by its place."""
    first = too_long[0]
    return (
        f"data.filter_overlong_prompts=true: {len(too_long)} of {num_prompts} prompts of {key} are left out, the first "
        f"in {first.prompt.place}: {first.reason}"
    )


def _reason(text: str, check: PromptCheck) -> str:
    try:
        check(text)
    except ValueError as error:
        return str(error)
    return ""
