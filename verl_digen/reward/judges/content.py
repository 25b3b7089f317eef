# SPDX-License-Identifier: Apache-2.0
"""Content of a request: pictures that the prompt is about, then the sample's frames, as PNG in data URIs, and the
question with columns of the prompt filled in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from string import Formatter
from typing import Any

from PIL import Image

from verl_digen.require import require
from verl_digen.reward.base import base64_of
from verl_digen.types import PromptRow

Part = dict[str, Any]
"""One part of a message's content."""


def fitted(image: Image.Image, max_px: int) -> Image.Image:
    """The picture, made smaller where its longer side has more than `max_px`; its shape stays."""
    longer = max(image.size)
    if longer <= max_px:
        return image
    width, height = (max(1, round(side * max_px / longer)) for side in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def picture_part(image: Image.Image) -> Part:
    """A picture as a part of a message."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64_of(image)}"}}


async def picture_parts(images: Sequence[Image.Image]) -> list[Part]:
    """Parts of several pictures, encoded in a thread: a PNG of a megapixel takes a quarter of a second."""
    return await asyncio.to_thread(lambda: [picture_part(image) for image in images])


def fields_of(question: str, key: str) -> tuple[str, ...]:
    """Names in braces, in order.

    Args:
        key: what the user typed it under, for the message.

    Raises:
        ValueError: a brace without its counterpart, or with anything but a name in it.
    """
    remedy = 'write {prompt}, {ground_truth} or {a column of the row}, and any other brace twice, e.g. {{"score": 4}}'
    try:
        parts = [part[1:] for part in Formatter().parse(question) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"{key} must be a text with names in braces, got {question!r} ({error}); {remedy}") from error
    for name, spec, conversion in parts:
        is_name = str(name).isidentifier() and not spec and not conversion
        require(is_name, f"{key} must have nothing but names in braces", name, remedy)
    return tuple(str(name) for name, _, _ in parts)


def filled(question: str, row: PromptRow, key: str) -> str:
    """The question about one prompt.

    Raises:
        ValueError: the row lacks a column that the question names.

    Example:
        filled("Does it show {prompt}?", PromptRow("a cat", "test", None), "judge.question")  # 'Does it show a cat?'
    """
    values: dict[str, Any] = {**row.extra, "prompt": row.text, "ground_truth": row.ground_truth}
    for name in fields_of(question, key):
        require(
            name in values and values[name] is not None,
            f"{key} must name columns that every prompt has ({', '.join(sorted(map(str, values)))})",
            name,
            f"add it to the row{f' ({row.place})' if row.place else ''}, or take it out of the question",
        )
    return question.format_map(values)
