# SPDX-License-Identifier: Apache-2.0
"""The one rule for picture and video sizes, and its error messages."""

from __future__ import annotations

from verl_digen.types import Geometry


def check_size(
    geometry: Geometry, *, title: str, px_multiple: int, max_px: int | None = None, frame_stride: int | None = None
) -> None:
    """ValueError, which names the key, the value and the nearest valid one, unless a checkpoint can make `geometry`:
    both sides are multiples of `px_multiple` of at most `max_px`, and a video has 1 + k * `frame_stride` frames (None
    for a model of pictures)."""
    if frame_stride is None and geometry.num_frames != 1:
        raise ValueError(
            f"digen.sampling.num_frames must be 1 for {title}, which makes pictures, got {geometry.num_frames}; "
            "set it to 1"
        )
    if frame_stride is not None:
        nearest = max(0, round((geometry.num_frames - 1) / frame_stride)) * frame_stride + 1
        if geometry.num_frames != nearest:
            raise ValueError(
                f"digen.sampling.num_frames must be 1 plus a multiple of {frame_stride} for this {title} checkpoint, "
                f"got {geometry.num_frames}; the nearest is {nearest}"
            )
    for key, value in (("height_px", geometry.height_px), ("width_px", geometry.width_px)):
        nearest = max(1, round(value / px_multiple)) * px_multiple
        if value != nearest:
            raise ValueError(
                f"digen.sampling.{key} must be a multiple of {px_multiple} for this {title} checkpoint, "
                f"got {value}; the nearest is {nearest}"
            )
        if max_px is not None and value > max_px:
            raise ValueError(
                f"digen.sampling.{key} must be at most {max_px} for this {title} checkpoint, "
                f"got {value}; the nearest is {max_px}"
            )
