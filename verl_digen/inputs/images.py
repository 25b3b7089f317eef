# SPDX-License-Identifier: Apache-2.0
"""Inputs that a model encodes: a prompt's text and images.

An image is named by a reference, a file's path or a place in a table (`verl_digen.inputs.tables`), and identified by
the hash of its content. Pixels are read where they are encoded or scored, and never travel with a prompt.

Invariants (tests/rollout/test_inputs.py): equal content has an equal key, wherever it lies; an image that changes
during a run is an error.
"""

import io
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from verl_digen.inputs.tables import TABLE, read_table_image
from verl_digen.require import refusing

MAX_IDENTIFIED = 65536
"""Number of images whose hash a process remembers."""
MAX_PIXELS = 100_000_000
"""Largest image of a prompt, 10,000 x 10,000: three times that in bytes, decoded."""
DEFAULT_IMAGE_PX = 1024
"""Side of the square whose area diffusers' pipelines give the image that the network reads."""
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)
"""EXIF tag, and its values for a picture that is shown with its sides exchanged."""


@dataclass(frozen=True)
class SourceImage:
    """An image by reference."""

    reference: str = field(compare=False)
    """A path, absolute, or a place in a table; readable on every node that encodes or scores it."""
    digest: str
    """SHA-256 of the file's bytes, hexadecimal. Images of equal content are equal."""
    width_px: int = field(compare=False)
    """Width as it is shown, after EXIF's orientation."""
    height_px: int = field(compare=False)
    content: bytes | None = field(default=None, compare=False, repr=False)
    """File's bytes of a generated picture, which travels with its request; None: they lie at `reference`."""

    def read(self) -> Image.Image:
        """Read the image as RGB, turned as EXIF says. ValueError if it is missing, or does not match `digest`."""
        content = _content(self.reference) if self.content is None else self.content
        if sha256(content).hexdigest() != self.digest:
            raise ValueError(
                f"an image of a prompt must stay as it is during a run, but {self.reference!r} has changed since its "
                "prompt was drawn; restore it, or start the run again"
            )
        with _reading(self.reference):
            return in_8_bits(ImageOps.exif_transpose(Image.open(io.BytesIO(content)))).convert("RGB")


@dataclass(frozen=True)
class PromptInputs:
    """Inputs of one branch of guidance. Equal ones have equal conditions."""

    text: str
    images: tuple[SourceImage, ...] = ()
    image_px: int = DEFAULT_IMAGE_PX
    """`digen.sampling.image_px`: side of the square whose area an edit model reads each image at, see
    `inputs.sizes`."""
    size: tuple[int, int, int] | None = None
    """(frames, height, width) of the picture or video that is made: a network that continues an image reads it at this
    size. None without images."""


@lru_cache(maxsize=MAX_IDENTIFIED)
def source_image(reference: str) -> SourceImage:
    """Identify an image by its content, read once per process. ValueError: no picture, or beyond `MAX_PIXELS`."""
    content = _content(reference)
    with _reading(reference):
        width, height = _size(io.BytesIO(content))
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"an image of a prompt must have at most {MAX_PIXELS} pixels, but {reference!r} has {width} x {height}; "
            "make it smaller, or remove its prompt"
        )
    return SourceImage(reference, sha256(content).hexdigest(), width, height)


def file_size_px(path: str) -> tuple[int, int]:
    """(width, height) of an image as it is shown, from its file's head alone. ValueError if it cannot be read."""
    with _reading(path), Path(path).open("rb") as file:
        return _size(file)


def generated_image(name: str, pixels: NDArray[np.uint8]) -> SourceImage:
    """A generated picture, [H, W, 3], as an image that a request carries; lossless. Messages call it `name`."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
    content = buffer.getvalue()
    return SourceImage(name, sha256(content).hexdigest(), pixels.shape[1], pixels.shape[0], content)


def read_images(references: Sequence[str]) -> list[Image.Image]:
    """The images as RGB, in their own sizes. Raises as `source_image` and `SourceImage.read`."""
    return [source_image(reference).read() for reference in references]


def content_key(branches: Sequence[PromptInputs]) -> str:
    """Hash of what is encoded: equal for equal texts, images and sizes at which these are read."""
    content = [
        [
            inputs.text,
            *(image.digest for image in inputs.images),
            *([inputs.image_px, inputs.size] if inputs.images else []),
        ]
        for inputs in branches
    ]
    return sha256(json.dumps(content).encode()).hexdigest()


def _size(file: IO[bytes]) -> tuple[int, int]:
    """(width, height) as the image is shown."""
    with Image.open(file) as image:
        width, height = image.size
        return (height, width) if image.getexif().get(ORIENTATION) in TURNED else (width, height)


def in_8_bits(picture: Image.Image) -> Image.Image:
    """The picture, with grey values of 16 or 32 bits, or floats in [0, 1], scaled; Pillow would cut them at 255."""
    if not picture.mode.startswith(("I", "F")):
        return picture
    values = np.asarray(picture)
    most = 1.0 if picture.mode == "F" else 255 if picture.mode == "I" and values.max() <= 255 else 65535
    if not (values.min() >= 0 and values.max() <= most):  # NaN fails both
        raise ValueError(f"its grey values must lie in [0, {most:g}], got {values.min():g} to {values.max():g}")
    return Image.fromarray(np.round(values * (255 / most)).astype(np.uint8))


def _reading(reference: str) -> AbstractContextManager[None]:
    """Context that decodes an image."""
    return refusing("an image of a prompt must be a picture file", reference, "replace it, or remove its prompt")


def _content(reference: str) -> bytes:
    if reference.startswith(TABLE):
        return read_table_image(reference)
    rule = "an image of a prompt must be a file that every node can read"
    with refusing(rule, reference, "put it on shared storage, or remove its prompt"):
        return Path(reference).read_bytes()
