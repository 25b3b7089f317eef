# SPDX-License-Identifier: Apache-2.0
"""JPEG compressibility (Black et al. 2023, DDPO; rule as in flow_grpo): minus the kilobytes at quality 95, over 500.

A video gets the mean over its frames, each scored as a separate picture: its reward does not depend on its length, and
compressibility over time (a still picture) is not rewarded.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from verl_digen.reward.base import encoded, frames_of

QUALITY = 95
KILOBYTES_PER_UNIT = 500.0


def compute_score(
    data_source: str, solution_image: NDArray[np.uint8], ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """-kB/500 of the picture as JPEG; the mean over frames for a video. Always negative; closer to 0 is smaller."""
    kilobytes = [
        len(encoded(frame, "JPEG", quality=QUALITY)) / 1000 for frame in map(Image.fromarray, frames_of(solution_image))
    ]
    return -float(np.mean(kilobytes)) / KILOBYTES_PER_UNIT


REWARD = compute_score
