# SPDX-License-Identifier: Apache-2.0
"""Reward of virtual samples: waits for the profile's scoring time and reads the pixel that the host wrote."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_digen.simulate.profile import load_profile


async def compute_score(
    data_source: str,
    solution_image: NDArray[np.uint8],
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    profile: str,
    time_scale: float,
) -> float:
    """First pixel / 255. `profile` and `time_scale` are `digen.virtual`'s."""
    await asyncio.sleep(time_scale * _score_s(profile))
    return float(solution_image.reshape(-1)[0]) / 255


@cache
def _score_s(profile: str) -> float:
    return load_profile(profile).numbers.score_s
