# SPDX-License-Identifier: Apache-2.0
"""Inputs that a model encodes: a prompt's text and images.

An image is named by its file and identified by the hash of its content. Pixels are read where they are encoded, and
never travel with a prompt.

Invariants (tests/rollout/test_inputs.py): equal content has an equal key, wherever it lies; a file that changes
during a run is an error.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from PIL import Image

MAX_IDENTIFIED = 65536
"""Number of image files whose hash a process remembers."""


@dataclass(frozen=True)
class ImageFile:
    """An image by reference."""

    path: str = field(compare=False)
    """Absolute, and readable on every node that encodes it."""
    digest: str
    """SHA-256 of the file's bytes, hexadecimal. Files of equal content are equal."""

    def read(self) -> Image.Image:
        """Read the image as RGB.

        Raises:
            ValueError: the file is missing or no image, or its content is not that of `digest`.
        """
        content = _content(self.path)
        if sha256(content).hexdigest() != self.digest:
            raise ValueError(
                f"an image of a prompt must stay as it is during a run, but {self.path!r} has changed since its prompt "
                "was drawn; restore it, or start the run again"
            )
        try:
            return Image.open(io.BytesIO(content)).convert("RGB")
        except (OSError, Image.DecompressionBombError) as error:
            raise ValueError(
                f"an image of a prompt must be a picture file, but {self.path!r} cannot be read: {error}; replace it, "
                "or remove its prompt"
            ) from error


@dataclass(frozen=True)
class PromptInputs:
    """Inputs of one branch of guidance. Equal ones have equal conditions."""

    text: str
    images: tuple[ImageFile, ...] = ()


@lru_cache(maxsize=MAX_IDENTIFIED)
def image_file(path: str) -> ImageFile:
    """Identify the image at `path` by its content, which is read once per process.

    Raises:
        ValueError: the file cannot be read.
    """
    return ImageFile(path, sha256(_content(path)).hexdigest())


def content_key(branches: Sequence[PromptInputs]) -> str:
    """Hash of what is encoded: equal for equal texts and images."""
    content = [[inputs.text, *(image.digest for image in inputs.images)] for inputs in branches]
    return sha256(json.dumps(content).encode()).hexdigest()


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"an image of a prompt must be a file that every node can read, got {path!r} ({error.strerror}); put it on "
            "shared storage, or remove its prompt"
        ) from error
