# SPDX-License-Identifier: Apache-2.0
"""Pictures of fixed validation prompts over time: one PNG per prompt, grids, and before/after.

    RUN_DIR/images/step_000010/val-00003.png     written by the agent loop worker that generated it
    RUN_DIR/images/step_000010.png               grid of that validation, with captions and rewards
    RUN_DIR/images/before_after.png              first and last validation side by side

A video is shown by its middle frame.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

CELL_PX = 160
"""Side of one picture in a grid."""
CAPTION_PX = 52
"""Height of the caption under it."""
CAPTION_COLUMNS, CAPTION_LINES = 26, 3
"""Letters that fit below a picture; the rest of a long prompt is left out."""
COLUMNS = 8
"""Pictures per row."""


@dataclass(frozen=True)
class Shown:
    """One picture of a grid."""

    path: Path
    prompt: str
    reward: float


def is_logged(index: int, num_logged: int) -> bool:
    """Whether the validation prompt at `index` is one of those that are shown."""
    return index < num_logged


def step_dir(run_dir: Path, step: int) -> Path:
    """Folder of the pictures of the validation after `step` optimizer steps."""
    return run_dir / "images" / f"step_{step:06d}"


def image_path(run_dir: Path, step: int, uid: str) -> Path:
    """File of one validation picture."""
    return step_dir(run_dir, step) / f"{uid}.png"


def save_image(pixels: Tensor, path: Path) -> None:
    """Write uint8 [H, W, 3], or the middle frame of [F, H, W, 3]."""
    frame = pixels if pixels.ndim == 3 else pixels[pixels.shape[0] // 2]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.ascontiguousarray(frame.numpy())).save(path)


def save_grid(shown: Sequence[Shown], path: Path, title: str) -> None:
    """A grid of pictures with caption and reward under each."""
    columns = min(COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    grid = Image.new("RGB", (columns * CELL_PX, 24 + rows * (CELL_PX + CAPTION_PX)), "white")
    draw = ImageDraw.Draw(grid)
    draw.text((4, 5), title, fill="black", font=_font(13))
    for position, entry in enumerate(shown):
        row, column = divmod(position, columns)
        _paste(grid, draw, entry, column * CELL_PX, 24 + row * (CELL_PX + CAPTION_PX))
    path.parent.mkdir(parents=True, exist_ok=True)
    grid.save(path)


def save_before_after(before: Sequence[Shown], after: Sequence[Shown], path: Path, titles: tuple[str, str]) -> None:
    """Two rows per group of prompts: the first validation above, the last below."""
    columns = min(COLUMNS, len(before))
    bands = -(-len(before) // columns)
    band_px = 2 * (CELL_PX + CAPTION_PX) + 48
    picture = Image.new("RGB", (columns * CELL_PX, bands * band_px), "white")
    draw = ImageDraw.Draw(picture)
    for band in range(bands):
        for line, (entries, title) in enumerate(zip((before, after), titles, strict=True)):
            top = band * band_px + line * (CELL_PX + CAPTION_PX + 24)
            draw.text((4, top + 5), title, fill="black", font=_font(13))
            for column, entry in enumerate(entries[band * columns : (band + 1) * columns]):
                _paste(picture, draw, entry, column * CELL_PX, top + 24)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def _paste(canvas: Image.Image, draw: ImageDraw.ImageDraw, entry: Shown, left: int, top: int) -> None:
    with Image.open(entry.path) as image:
        smooth = max(image.size) > CELL_PX
        scaled = image.resize(
            (CELL_PX - 4, CELL_PX - 4), Image.Resampling.LANCZOS if smooth else Image.Resampling.NEAREST
        )
    canvas.paste(scaled, (left + 2, top))
    caption = textwrap.wrap(f"{entry.reward:.2f}  {entry.prompt}", CAPTION_COLUMNS)[:CAPTION_LINES]
    draw.text((left + 4, top + CELL_PX - 2), "\n".join(caption), fill="black", font=_font(11))


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
