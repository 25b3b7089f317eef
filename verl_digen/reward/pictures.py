# SPDX-License-Identifier: Apache-2.0
"""Pictures of a sample as scorers want them: PIL images, few frames of a video, encoded bytes."""

from __future__ import annotations

import io
from base64 import b64encode
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from verl_digen.types import RewardInput


def frames_of(pixels: NDArray[np.uint8], at_most: int | None = None) -> NDArray[np.uint8]:
    """[F, H, W, 3] of a picture [H, W, 3] (F = 1) or a video [F, H, W, 3].

    Args:
        at_most: take this many frames, evenly spaced with the first and the last; one frame is the middle one.
    """
    frames = pixels if pixels.ndim == 4 else pixels[None]
    if at_most is None or len(frames) <= at_most:
        return frames
    if at_most == 1:
        return frames[len(frames) // 2][None]
    return frames[np.linspace(0, len(frames) - 1, at_most).round().astype(int)]


def images_of(sample: RewardInput, at_most: int | None = None) -> list[Image.Image]:
    """The sample's frames as RGB images; a picture is one frame. `at_most` as in `frames_of`."""
    return [Image.fromarray(frame) for frame in frames_of(sample.pixels, at_most)]


def encoded(image: Image.Image, format: Literal["PNG", "JPEG"] = "PNG", *, quality: int = 95) -> bytes:
    """A picture as a file in memory; `quality` is JPEG's."""
    buffer = io.BytesIO()
    options = {"quality": quality} if format == "JPEG" else {}
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


def base64_of(image: Image.Image, format: Literal["PNG", "JPEG"] = "PNG", *, quality: int = 95) -> str:
    """`encoded` as text, for JSON."""
    return b64encode(encoded(image, format, quality=quality)).decode("ascii")
