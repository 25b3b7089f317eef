# SPDX-License-Identifier: Apache-2.0
"""The JSON form of UniRL's reward service: requests -> samples, scores -> answer.

    POST /score    {"requests": [{"history": [{"text", "image_b64" | "video_b64" | "video_path"}, ...],
                                  "required_rewards": ["ocr"], "metadata": {...}}]}
    answer         {"results": [{"ocr": {"ocr": 0.9, ...}}], "errors": [{"pickscore": "why"}]}

The last turn of a history is scored for its text; pictures of earlier turns are its sources, as for an edited picture.
`metadata` gives `ground_truth` and `data_source`, and joins `extra_info`. A picture that cannot be read fails its own
request alone. Source: the service's README (UniRL, reward_service).
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel, Field, JsonValue

from verl_digen.data.prompts import default_ground_truth
from verl_digen.score import files
from verl_digen.score.rewards import Scored
from verl_digen.types import PromptRow, RewardInput

SOURCE = "served"
"""Data source of a request that names none."""


class Turn(BaseModel):
    """A prompt and what was made from it."""

    text: str
    image_b64: str | None = None
    video_b64: str | None = None
    video_path: str | None = None


class ScoreRequest(BaseModel):
    """One sample and the rewards it wants."""

    history: list[Turn] = Field(min_length=1)
    required_rewards: list[str] = Field(min_length=1)
    metadata: dict[str, JsonValue] | None = None


class ScoreRequests(BaseModel):
    """Body of `POST /score`."""

    requests: list[ScoreRequest]


@dataclass(frozen=True)
class Limits:
    """Limits of what a request may ask of this machine."""

    max_px: int
    """Pixels of one picture or frame."""
    video_root: Path | None
    """Folder in which `video_path` may lie; None refuses every path."""


def sample_of(request: ScoreRequest, index: int, limits: Limits, folder: Path) -> RewardInput:
    """The sample of a request.

    Args:
        index: its number, which makes its group's name.
        folder: a folder of this call's own, for the source pictures and videos that it brings.

    Raises:
        ValueError: no picture or several in a turn, one that cannot be read, or is larger than allowed.
    """
    *earlier, last = request.history
    sources = []
    for number, turn in enumerate(earlier):
        path = folder / f"{index}_{number}.png"
        pixels = _pixels(turn, f"history[{number}]", limits, folder)
        Image.fromarray(pixels if pixels.ndim == 3 else pixels[0]).save(path)
        sources.append(str(path))
    metadata: Mapping[str, Any] = request.metadata or {}
    source = metadata.get("data_source", SOURCE)
    if not isinstance(source, str):
        raise ValueError(f"metadata.data_source must be a string, got {source!r}; leave it out")
    truth = metadata.get("ground_truth")
    row = PromptRow(
        text=last.text,
        data_source=source,
        ground_truth=default_ground_truth(last.text, source) if truth is None else truth,
        extra=dict(metadata),
        uid=str(index),
        images=tuple(sources),
    )
    return RewardInput(_pixels(last, f"history[{len(earlier)}]", limits, folder), row, 0)


def answer_of(requests: Sequence[ScoreRequest], scored: Sequence[Scored | str]) -> dict[str, Any]:
    """The answer: for each request its rewards' scores with their details, and why those that are missing failed.

    Args:
        scored: scores, or why the request has none.
    """
    results, errors = [], []
    for request, score in zip(requests, scored, strict=True):
        if isinstance(score, str):
            results.append({})
            errors.append(dict.fromkeys(request.required_rewards, score))
            continue
        found: dict[str, dict[str, float]] = {}
        for part, value in score.parts.items():
            name, _, detail = part.partition("/")
            found.setdefault(name, {})[detail or name] = value
        results.append(found)
        errors.append(dict(score.errors))
    return {"results": results, "errors": errors}


def _pixels(turn: Turn, where: str, limits: Limits, folder: Path) -> NDArray[np.uint8]:
    given = [name for name in ("image_b64", "video_b64", "video_path") if getattr(turn, name) is not None]
    if len(given) != 1:
        raise ValueError(f"{where} must have one of image_b64, video_b64 and video_path, got {given or 'none'}")
    if turn.image_b64 is not None:
        return _image(_bytes(turn.image_b64, f"{where}.image_b64"), f"{where}.image_b64", limits)
    if turn.video_b64 is not None:
        path = folder / f"{len(list(folder.iterdir()))}.mp4"
        path.write_bytes(_bytes(turn.video_b64, f"{where}.video_b64"))
    else:
        path = _allowed(str(turn.video_path), f"{where}.video_path", limits)
    pixels = files.read(path)
    _require_size(pixels.shape[-2], pixels.shape[-3], where, limits)
    return pixels


def _image(encoded: bytes, where: str, limits: Limits) -> NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            _require_size(image.width, image.height, where, limits)  # read from its head, before it takes memory
            return files.rgb(image)
    except (OSError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"{where} must be a picture that Pillow reads: {error}") from error


def _require_size(width: int, height: int, where: str, limits: Limits) -> None:
    if width * height > limits.max_px:
        raise ValueError(f"{where} must have at most {limits.max_px} pixels, got {width} x {height}")


def _bytes(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where} must be base64: {error}") from error


def _allowed(name: str, where: str, limits: Limits) -> Path:
    """The path, if it lies in the folder that was opened for this."""
    if limits.video_root is None:
        raise ValueError(f"{where} must not be used: this server reads no files; send video_b64")
    path = Path(name).resolve()
    if not path.is_relative_to(limits.video_root.resolve()) or not path.is_file():
        raise ValueError(f"{where} must be a file in the server's --video-root, got {name!r}")
    return path
