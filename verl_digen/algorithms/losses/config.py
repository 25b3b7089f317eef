# SPDX-License-Identifier: Apache-2.0
"""`digen.loss`: the hyper-parameters of all policy losses, each read by the losses its docstring names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_digen.schedulers.require import require


@dataclass(frozen=True)
class LossConfig:
    """`digen.loss`: what a policy loss needs beside its inputs."""

    clip_range: float = 1e-4
    """The importance ratio is clipped below, at 1 - clip_range; small because log-probs are means over latent
    dims. 1e-4 in Flow-GRPO (SD3.5), 1e-5 in Flow-GRPO-Fast and for Qwen-Image, 1e-3 for Wan. SDE law cps has
    another scale."""
    clip_range_high: float | None = None
    """The importance ratio is clipped above, at 1 + clip_range_high. null: clip_range."""
    advantage_clip: float = 5.0
    """Advantages are clamped to +- this (5 in Flow-GRPO). .inf: they are not."""

    def __post_init__(self) -> None:
        require(
            0 < self.clip_range < 1,
            "digen.loss.clip_range must lie in (0, 1)",
            self.clip_range,
            "1e-5 to 1e-3 are usual",
        )
        require(
            self.clip_range_high is None or 0 < self.clip_range_high < math.inf,
            "digen.loss.clip_range_high must be > 0 and finite",
            self.clip_range_high,
            "null takes digen.loss.clip_range",
        )
        require(
            self.advantage_clip > 0,
            "digen.loss.advantage_clip must be > 0",
            self.advantage_clip,
            ".inf never clamps",
        )

    @property
    def ratio_range(self) -> tuple[float, float]:
        """(1 - clip_range, 1 + clip_range_high)."""
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return 1 - self.clip_range, 1 + high
