# SPDX-License-Identifier: Apache-2.0
"""Pictures and videos on disk: finding them, and reading them as pixels.

- A picture is turned as its EXIF says, 16 bits become 8, and what is transparent is laid on white.
- An animated picture (GIF, WebP, PNG) with several frames and a film are videos: all their frames.
- `.npy` holds uint8 pixels, or floats in [0, 1], as [H, W, 3] or [F, H, W, 3].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, ImageSequence

from verl_digen.require import require
from verl_digen.reward.needs import imported

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
FILMS = (".mp4", ".mov", ".mkv", ".webm", ".avi")
ARRAY = ".npy"
SUFFIXES = (*PICTURES, *FILMS, ARRAY)
"""Endings of files that are scored, in any case."""


def find(paths: Iterable[str]) -> list[Path]:
    """Files to score: those named, and the pictures and videos in the folders named and below, in natural order.

    Example:
        find(["out"])  # out/2.png, out/10.png, out/sub/1.png

    Raises:
        ValueError: a path is not there, is a file of another kind, or is a folder without pictures.
    """
    found: dict[Path, None] = {}
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = [file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in SUFFIXES]
            require(
                bool(inside), f"a folder must hold pictures or videos ({', '.join(SUFFIXES)})", name, "name another one"
            )
            found |= dict.fromkeys(sorted(inside, key=natural_order))
        else:
            require(path.is_file(), "files to score must exist", name, "check the path")
            require(
                path.suffix.lower() in SUFFIXES,
                f"files to score must end in one of {', '.join(SUFFIXES)}",
                name,
                "convert it",
            )
            found[path] = None
    return list(found)


def natural_order(path: Path) -> tuple[object, ...]:
    """Sorting key by which 2.png comes before 10.png, and files before files of folders below."""
    words = [tuple((not w.isdigit(), int(w) if w.isdigit() else w) for w in _words(part)) for part in path.parts]
    return (len(path.parts), *words)


def _words(text: str) -> Sequence[str]:
    return [word for word in re.split(r"([0-9]+)", text) if word]


def read(path: Path) -> NDArray[np.uint8]:
    """Pixels of a file, uint8 [H, W, 3], or [F, H, W, 3] for a video.

    Raises:
        ValueError: it cannot be read as what its ending says.
    """
    try:
        if path.suffix.lower() == ARRAY:
            return _array(path)
        return _film(path) if path.suffix.lower() in FILMS else _picture(path)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        # Pillow raises each of these for a malformed file
        raise ValueError(f"{str(path)!r} cannot be read: {str(error) or type(error).__name__}") from error


def _rgb(image: Image.Image) -> NDArray[np.uint8]:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits a pixel; Pillow's own conversion clips
        image = Image.fromarray((np.asarray(image).astype(np.float64) / 257).round().clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return np.asarray(image.convert("RGB"))


def _picture(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        frames = (
            [_rgb(frame.copy()) for frame in ImageSequence.Iterator(image)]
            if path.suffix.lower()
            not in (
                ".tif",
                ".tiff",
            )
            else [_rgb(image)]
        )
    return frames[0] if len(frames) == 1 else np.stack(frames)


def _film(path: Path) -> NDArray[np.uint8]:
    cv2 = imported("cv2", f"of the video {path.name}")
    film = cv2.VideoCapture(str(path))
    try:
        frames = []
        while True:
            is_read, frame = film.read()
            if not is_read:
                break
            frames.append(frame[..., ::-1])
    finally:
        film.release()
    if not frames:
        raise ValueError("no frame of it can be decoded")
    return np.ascontiguousarray(np.stack(frames))


def _array(path: Path) -> NDArray[np.uint8]:
    pixels = np.load(path, allow_pickle=False)
    require(
        pixels.ndim in (3, 4) and pixels.shape[-1] == 3 and pixels.size > 0,
        "an array must be [H, W, 3] or [F, H, W, 3]",
        tuple(pixels.shape),
        "move the channels to the end",
    )
    if pixels.dtype == np.uint8:
        return pixels
    in_range = np.issubdtype(pixels.dtype, np.floating) and bool(((pixels >= 0) & (pixels <= 1)).all())
    require(in_range, "an array must be uint8, or floats in [0, 1] without nan", str(pixels.dtype), "convert it")
    return (pixels * 255).round().astype(np.uint8)
