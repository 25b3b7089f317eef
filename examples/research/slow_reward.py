# SPDX-License-Identifier: Apache-2.0
"""A reward that takes `seconds` and says nothing: beside another one it stands for a VLM judge or a remote server, of
which any number of samples may wait at once.

    digen bench --modes colocated+tsp,gap+tsp+tag,gap+tsp+tag+tcss --repeats 2 --steps 10 -- 'digen.reward.functions={
        shapes: {weight: 1.0, reward: examples/drawn_world/shapes_reward.py:compute_score},
        slow: {weight: 1.0, reward: examples/research/slow_reward.py:compute_score, seconds: 2.5}}'
"""

from __future__ import annotations

import asyncio
from typing import Any


async def compute_score(
    data_source: str, solution_image: Any, ground_truth: Any, extra_info: Any = None, *, seconds: float
) -> float:
    """Wait, and add nothing to the reward."""
    await asyncio.sleep(seconds)
    return 0.0
