# SPDX-License-Identifier: Apache-2.0
"""Pixels as Qwen2-VL's vision tower takes them: sizes, and patches with their grid.

transformers has both for pictures, and for videos only where torchvision is installed; the patches of a picture are
those of its image processor (tests/reward/test_qwen_regressor.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from verl_digen.reward.encoders import clip_pixels

PATCH, MERGE, TEMPORAL = 14, 2, 2
"""Side of a patch in px; patches per token along each side; frames per patch."""
FACTOR = PATCH * MERGE
"""Both sides of a frame are multiples of this, in px."""


@dataclass(frozen=True)
class Patches:
    """A picture or video for the vision tower."""

    values: Tensor
    """[N, 3 * TEMPORAL * PATCH * PATCH] fp32."""
    grid: tuple[int, int, int]
    """(frames / TEMPORAL, height / PATCH, width / PATCH); its product is N."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it takes in the text."""
        return self.grid[0] * self.grid[1] * self.grid[2] // MERGE**2


def size_of(height: int, width: int, *, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) in px to which a frame is scaled.

    Raises:
        ValueError: one side is over 200 times the other.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    return smart_resize(height, width, factor=FACTOR, min_pixels=min_pixels, max_pixels=max_pixels)


def scaled_picture(frame: NDArray[np.uint8], *, min_pixels: int, max_pixels: int) -> NDArray[np.uint8]:
    """A frame [H, W, 3] scaled by Pillow's bicubic filter, as `qwen_vl_utils` scales pictures."""
    height, width = size_of(*frame.shape[:2], min_pixels=min_pixels, max_pixels=max_pixels)
    return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC))


def scaled_video(frames: NDArray[np.uint8], *, min_pixels: int, max_pixels: int) -> NDArray[np.uint8]:
    """Frames [F, H, W, 3] scaled by PyTorch's antialiased bicubic filter, as `qwen_vl_utils` scales videos."""
    size = size_of(*frames.shape[1:3], min_pixels=min_pixels, max_pixels=max_pixels)
    moved = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float()
    scaled = torch.nn.functional.interpolate(moved, size, mode="bicubic", antialias=True)
    return scaled.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def patches_of(frames: NDArray[np.uint8]) -> Patches:
    """Patches of frames [F, H, W, 3] whose sides are multiples of `FACTOR`; an odd last frame is repeated."""
    if len(frames) % TEMPORAL:
        frames = np.concatenate([frames, frames[-1:]])
    num_frames, height, width, channels = frames.shape
    grid = (num_frames // TEMPORAL, height // PATCH, width // PATCH)
    split = clip_pixels(np.ascontiguousarray(frames)).reshape(
        *(grid[0], TEMPORAL, channels),
        *(grid[1] // MERGE, MERGE, PATCH),
        *(grid[2] // MERGE, MERGE, PATCH),
    )
    ordered = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # patches of one token side by side
    return Patches(ordered.reshape(-1, channels * TEMPORAL * PATCH * PATCH), grid)
