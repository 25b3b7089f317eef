# SPDX-License-Identifier: Apache-2.0
"""Checks that every built-in scorer passes: batches, sizes, videos, odd prompts."""

import asyncio
import inspect
from collections.abc import Sequence

import numpy as np
import pytest

from verl_digen.reward.base import Reward
from verl_digen.reward.scoring import read_result
from verl_digen.types import PromptRow, RewardInput

SIZES = ((64, 64), (48, 96), (512, 256), (17, 31))
"""(height, width) in px: square, wide, tall, odd and small."""
HUGE = (2048, 1024)


def make_picture(height: int = 64, width: int = 64, *, seed: int = 0, frames: int | None = None) -> np.ndarray:
    """Smooth random colours, uint8 [H, W, 3], or [F, H, W, 3] with `frames`."""
    random = np.random.default_rng(seed)
    shape = (1 if frames is None else frames, height, width, 3)
    coarse = random.integers(0, 256, (shape[0], -(-height // 8), -(-width // 8), 3), np.uint8)
    pixels = coarse.repeat(8, axis=1).repeat(8, axis=2)[:, :height, :width]
    return pixels[0] if frames is None else pixels


def make_samples(texts: Sequence[str] = ("a red square", "two dogs", "", "a long prompt " * 300)) -> list[RewardInput]:
    """A picture per text, each of another size; the texts include an empty and a very long one."""
    return [
        RewardInput(make_picture(*size, seed=number), PromptRow(text, "test", None, uid=f"g{number}"), 0)
        for number, (text, size) in enumerate(zip(texts, SIZES, strict=True))
    ]


def scores_of(reward: Reward, batch: Sequence[RewardInput]) -> list[tuple[float, dict[str, float]]]:
    """(value, details) of every sample, checked as a run checks them."""

    async def call():
        found = reward.score(batch)
        return await found if inspect.isawaitable(found) else found

    results = asyncio.run(call())
    assert len(results) == len(batch)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [(value, dict(details)) for value, details in (read_result("tested", result) for result in results)]


def check_contract(reward: Reward, samples: Sequence[RewardInput] | None = None, *, abs_tol: float = 1e-5) -> None:
    """Assert that a batch equals its samples one by one, in any order, and that a video and a huge one are scored."""
    samples = make_samples() if samples is None else list(samples)
    together = scores_of(reward, samples)
    for others in ([scores_of(reward, [sample])[0] for sample in samples], scores_of(reward, samples[::-1])[::-1]):
        for (value, details), (other, other_details) in zip(together, others, strict=True):
            assert other == pytest.approx(value, abs=abs_tol)
            assert other_details == pytest.approx(details, abs=abs_tol)
    row = samples[0].row
    video = RewardInput(make_picture(64, 64, frames=5), row, 0)
    scores_of(reward, [video, samples[0], RewardInput(make_picture(*HUGE), row, 0)])
