# SPDX-License-Identifier: Apache-2.0
"""Pictures and videos of fixed validation prompts over time: a file per prompt (`run_files`), which the agent loop
worker writes that generated it, grids with captions and rewards, and before/after.

A video has a GIF, because PIL writes it and every viewer plays it (TensorBoard too); it has only 256 colours, so
measurements use the frames.

Invariants (tests/observe): a grid's cells have the pictures' shape; nothing is stretched.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from verl_digen.inputs.audio import Audio, save_wav
from verl_digen.inputs.images import read_images
from verl_digen.observe.run_files import audio_path, video_path

CELL_PX = 160
"""Height of a picture in a grid, and the least width of its cell."""
CAPTION_PX = 52
"""Least height of the caption under it; a longer one takes what it needs, and so do those beside it."""
LETTER_PX, LINE_PX = 6, 13
"""Width of a letter of a caption, and height of its lines."""
TITLE_PX = 24
"""Height of a title above a row."""
WORSE = "#B3261E"
"""Colour of the caption of a picture whose reward has fallen."""
GRID_PX = 8 * CELL_PX
"""Maximum width of a row of cells, if it has more than one."""
STRIP_FRAMES = 4
"""Frames of a video's filmstrip."""
VIDEO_PX = 416
"""Longer side of a GIF; half of Wan's 832 px."""
FRAME_MS = 60
"""Time of a frame in a GIF, which counts in 10 ms: 16 frames/s, as Wan's."""


@dataclass(frozen=True)
class Shown:
    """One picture of a grid."""

    path: Path
    prompt: str
    reward: float | None
    """None: not scored."""
    change: float | None = None
    """Change of the reward since the picture that this one is compared with."""

    def caption(self, digits: int) -> str:
        """The reward with `digits` decimals, its change, and the prompt."""
        if self.reward is None:
            return self.prompt
        change = "" if self.change is None else f" ({self.change:+.{digits}f})"
        return f"{self.reward:.{digits}f}{change}  {self.prompt}"


def save_pixels(pixels: Tensor, path: Path, images: Sequence[str] = (), audio: Audio | None = None) -> None:
    """Write uint8 [H, W, 3] to the PNG `path`, with the prompt's `images` at its left; for [F, H, W, 3] the filmstrip,
    and beside it the video as a GIF, with its sound in a WAV file. ValueError: an image cannot be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_video = pixels.ndim == 4
    _beside(read_images(images), _to_image(filmstrip(pixels) if is_video else pixels)).save(path)
    if is_video:
        save_video(pixels, video_path(path))
    if audio is not None:
        save_wav(audio, audio_path(path))


def filmstrip(frames: Tensor) -> Tensor:
    """[F, H, W, 3] -> [H, N * W, 3]: N evenly spaced frames from the first to the last."""
    count = min(STRIP_FRAMES, len(frames))
    chosen = torch.linspace(0, len(frames) - 1, count).round().long()
    return torch.cat(list(frames[chosen]), dim=1)


def save_video(frames: Tensor, path: Path) -> None:
    """Write uint8 [F, H, W, 3] as a looping GIF, at most `VIDEO_PX` wide or high."""
    pictures = [_to_image(frame) for frame in frames]
    if max(pictures[0].size) > VIDEO_PX:
        pictures = [ImageOps.contain(picture, (VIDEO_PX, VIDEO_PX)) for picture in pictures]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=FRAME_MS, loop=0)


def save_before_after(before: Sequence[Shown], after: Sequence[Shown], path: Path, titles: tuple[str, str]) -> None:
    """Two rows per group of prompts: the first validation above, the last below, with the change of each reward; the
    mean reward of the pictures is added to the titles."""
    after = _compared(before, after)
    save_grid([(_with_mean(titles[0], before), before), (_with_mean(titles[1], after), after)], path)


def save_grid(series: Sequence[tuple[str, Sequence[Shown]]], path: Path) -> None:
    """Write rows of as many pictures as fit, with caption and reward under each, of each (title, pictures) in turn. One
    title is above the first row alone, of several each is above its own rows."""
    everything = [entry for _, shown in series for entry in shown]
    width = max(CELL_PX, *(math.ceil(CELL_PX * _aspect(entry.path)) for entry in everything))
    longest = max(len(textwrap.wrap(entry.caption(2), width // LETTER_PX)) for entry in everything)
    row_px, num_shown = CELL_PX + max(CAPTION_PX, LINE_PX * (longest + 1)), len(series[0][1])
    columns = max(1, min(num_shown, GRID_PX // width))
    rows = [
        (title if start == 0 or len(series) > 1 else "", shown[start : start + columns])
        for start in range(0, num_shown, columns)
        for title, shown in series
    ]
    titles_px = TITLE_PX * sum(title != "" for title, _ in rows)
    canvas = Image.new("RGB", (columns * width, titles_px + len(rows) * row_px), "white")
    draw, top = ImageDraw.Draw(canvas), 0
    for title, entries in rows:
        if title:
            draw.text((4, top + 5), title, fill="black", font=ImageFont.load_default(13))
            top += TITLE_PX
        for column, entry in enumerate(entries):
            _paste(canvas, draw, entry, column * width, top, width)
        top += row_px
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path)


def _compared(before: Sequence[Shown], after: Sequence[Shown]) -> list[Shown]:
    """`after`, with the change of each reward since the picture of the same file name."""
    earlier = {entry.path.name: entry.reward for entry in before}

    def change(entry: Shown) -> float | None:
        then = earlier.get(entry.path.name)
        return None if then is None or entry.reward is None else entry.reward - then

    return [replace(entry, change=change(entry)) for entry in after]


def _with_mean(title: str, shown: Sequence[Shown]) -> str:
    rewards = [entry.reward for entry in shown if entry.reward is not None]
    changes = [entry.change for entry in shown if entry.change is not None]
    mean = f", mean reward of these {fmean(rewards):.3f}" if rewards else ""
    return f"{title}{mean}" + (f" ({fmean(changes):+.3f})" if changes else "")


def _beside(sources: Sequence[Image.Image], picture: Image.Image) -> Image.Image:
    """The sources and the picture in a row, all of the picture's height."""
    height = picture.height
    scaled = [source.resize((max(1, round(source.width * height / source.height)), height)) for source in sources]
    return Image.fromarray(np.hstack([np.asarray(one) for one in (*scaled, picture)]))


def _aspect(path: Path) -> float:
    with Image.open(path) as image:
        return image.width / image.height


def _paste(canvas: Image.Image, draw: ImageDraw.ImageDraw, entry: Shown, left: int, top: int, width: int) -> None:
    with Image.open(entry.path) as image:
        smooth = image.height > CELL_PX or image.width > width
        method = Image.Resampling.LANCZOS if smooth else Image.Resampling.NEAREST
        scaled = ImageOps.contain(image, (width - 4, CELL_PX - 4), method)
    canvas.paste(scaled, (left + 2, top))
    letters = width // LETTER_PX
    caption = "\n".join(textwrap.wrap(entry.caption(2), letters))
    fill = WORSE if entry.change is not None and entry.change < 0 else "black"
    draw.text((left + 4, top + CELL_PX - 2), caption, fill=fill, font=ImageFont.load_default(11), spacing=LINE_PX - 11)


def _to_image(pixels: Tensor) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(pixels.numpy()))
