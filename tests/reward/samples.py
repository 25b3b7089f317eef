# SPDX-License-Identifier: Apache-2.0
"""Samples for reward tests."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from verl_digen.reward.base import Reward
from verl_digen.types import PromptRow, RewardInput

LATENT = "tests.reward.samples.MeanLatent"


class MeanLatent(Reward):
    """A reward of latents."""

    @classmethod
    def reads_latents(cls, arguments: Any) -> bool:
        return True

    def score(self, batch: Any) -> list[float]:
        return [float(sample.latents.final.mean()) for sample in batch]


class Attribute(MeanLatent):
    reads_latents = True  # type: ignore[assignment] # a user's slip


def make_sample(index: int = 0, *, uid: str = "g", value: int = 0) -> RewardInput:
    """A picture of 4 x 4 px whose every byte is `value`."""
    pixels = np.full((4, 4, 3), value, np.uint8)
    return RewardInput(pixels, PromptRow("a cat", "test", "cat", uid=uid, extra={"tag": "x"}), index)


class Handle:
    """Handle of a reward worker in this process."""

    def __init__(self, worker: Any):
        self.score = SimpleNamespace(
            remote=lambda *given: asyncio.ensure_future(worker.score(*given)), options=lambda **_: self.score
        )
