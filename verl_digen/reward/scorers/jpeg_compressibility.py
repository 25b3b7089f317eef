# SPDX-License-Identifier: Apache-2.0
"""JPEG compressibility (Black et al. 2023, DDPO; rule as in flow_grpo): minus the kilobytes at quality 95, over 500.

A video gets the mean over its frames, each scored as a separate picture: its reward does not depend on its length, and
compressibility over time (a still picture) is not rewarded.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from verl_digen.reward.pictures import frames_of

QUALITY = 95
KILOBYTES_PER_UNIT = 500.0


def compute_score(
    data_source: str, solution_image: NDArray[np.uint8], ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """-kB/500 of the picture as JPEG; the mean over frames for a video. Always negative; closer to 0 is smaller."""
    return -float(np.mean([kilobytes(frame) for frame in frames_of(solution_image)])) / KILOBYTES_PER_UNIT


def kilobytes(frame: NDArray[np.uint8]) -> float:
    """Size of a picture [H, W, 3] as JPEG at `QUALITY`, in kB of 1000 bytes."""
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="JPEG", quality=QUALITY)
    return len(buffer.getvalue()) / 1000


REWARD = compute_score
