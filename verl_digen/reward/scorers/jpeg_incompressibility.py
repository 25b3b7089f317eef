# SPDX-License-Identifier: Apache-2.0
"""JPEG incompressibility (Black et al. 2023, DDPO; rule as in flow_grpo): the kilobytes at quality 95, over 500.

The negative of `jpeg_compressibility`: rewards detail, and noise. A video gets the mean over its frames.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_digen.reward.scorers import jpeg_compressibility


def compute_score(
    data_source: str, solution_image: NDArray[np.uint8], ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """kB/500 of the picture as JPEG; the mean over frames for a video. Always positive."""
    return -jpeg_compressibility.compute_score(data_source, solution_image, ground_truth, extra_info)


REWARD = compute_score
