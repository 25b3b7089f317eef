# SPDX-License-Identifier: Apache-2.0
"""Scores of samples that are pictures of the data set: who made the pair has judged it, and no reward is called."""

from __future__ import annotations

import time

from verl_digen.types import Score

CHOSEN = 0
"""Sample index of the preferred picture of `PromptRow.pair`."""


def pair_score(sample_index: int) -> tuple[Score, tuple[float, float]]:
    """Reward 1 of the chosen picture, 0 of the rejected one, without parts; and (start, end) in unix time."""
    now_s = time.time()
    return Score(1.0 if sample_index == CHOSEN else 0.0, {}, ()), (now_s, now_s)
