# SPDX-License-Identifier: Apache-2.0
"""Diversity of a group: how much a picture differs from the other pictures of its prompt.

The score of a sample is its mean distance to the others of its group. The distance of two pictures is the root mean
square of the differences of their pixels, from 0 (equal) to 1 (black and white), at `size_px` x `size_px`, so that
noise counts little. Videos are compared frame by frame. No model: a check against collapse, not a judge of taste.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from verl_digen.require import In, require
from verl_digen.reward.base import Result, Reward, frames_of
from verl_digen.types import RewardInput


@dataclass(frozen=True)
class DiversityConfig:
    size_px: Annotated[int, In("[1, inf]")] = 32
    """Width and height at which pictures are compared."""


class Diversity(Reward):
    scope = "group"
    config_class = DiversityConfig

    def score(self, batch: Sequence[RewardInput]) -> Sequence[Result]:
        """Mean distance of each sample to the others; [G] in [0, 1]. ValueError if there are no others."""
        require(
            len(batch) > 1, "diversity needs at least 2 samples of a prompt", len(batch), "generate or score more of it"
        )
        flat = np.stack([self._small(sample.pixels).reshape(-1) for sample in batch])
        distances = np.stack([np.sqrt(np.square(flat - one).mean(axis=1)) for one in flat])
        return [float(total) / (len(batch) - 1) for total in distances.sum(axis=1)]

    def _small(self, pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
        """[F, size, size, 3] in [0, 1]."""
        size = (self.config.size_px, self.config.size_px)
        small = [np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX)) for frame in frames_of(pixels)]
        return np.stack(small) / 255.0


REWARD = Diversity
