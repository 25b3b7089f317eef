# SPDX-License-Identifier: Apache-2.0
"""Pictures of a request: those that the prompt is about, then the sample's frames, as PNG in data URIs."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from PIL import Image

from verl_digen.reward.pictures import encoded, images_of
from verl_digen.types import RewardInput

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
    data = b64encode(encoded(image)).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


async def picture_parts(images: Sequence[Image.Image]) -> list[Part]:
    """Parts of several pictures, encoded in a thread: a PNG of a megapixel takes a quarter of a second."""
    return await asyncio.to_thread(lambda: [picture_part(image) for image in images])


def text_part(text: str) -> Part:
    """A text as a part of a message."""
    return {"type": "text", "text": text}


def sample_images(samples: Sequence[RewardInput], num_frames: int, max_px: int) -> list[Image.Image]:
    """Frames of the samples, one sample after the other; at most `num_frames` of each."""
    return [fitted(image, max_px) for sample in samples for image in images_of(sample, num_frames)]
