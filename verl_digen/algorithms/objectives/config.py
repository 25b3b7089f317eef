# SPDX-License-Identifier: Apache-2.0
"""Settings of losses, the keys under `digen.loss`: every loss has a dataclass of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from verl_digen.algorithms.ema import Decay
from verl_digen.require import In, check_fields


@dataclass(frozen=True)
class LossConfig:
    """Settings of a loss without any."""

    def __post_init__(self) -> None:
        check_fields(self, "digen.loss.")

    @property
    def advantage_bound(self) -> float:
        """Advantages are clamped to +- this by the loss; inf: they are not."""
        return math.inf

    def unclamped(self) -> LossConfig:
        """Copy for advantages that are divided by their scale later, and must not be clamped before."""
        return self

    @property
    def clip_widths(self) -> Mapping[str, float]:
        """Keys under `digen.loss` -> distance from 1 at which they take a row's ratio out of the gradient."""
        return {}

    @property
    def more_columns(self) -> tuple[str, ...]:
        """Columns that the loss reads with these settings, besides those that it always reads."""
        return ()

    @property
    def more_latents(self) -> tuple[str, ...]:
        """Latents that the loss reads with these settings, besides those that it always reads."""
        return ()

    @property
    def copies(self) -> Mapping[str, Decay]:
        """EMA copies of the trained policy: name -> decay of its average."""
        return {}

    @property
    def taught_by(self) -> str | None:
        """Folder of the LoRA adapter that is policy `teacher`; None for a loss without a teacher."""
        return None


@dataclass(frozen=True)
class ClampedConfig(LossConfig):
    """Settings that every loss of clamped advantages has."""

    advantage_clip: Annotated[float, In("(0, inf]"), "inf (in a file .inf) never clamps"] = 5.0
    """Advantages are clamped to +- this (5 in Flow-GRPO). .inf: no clamping."""

    @property
    def advantage_bound(self) -> float:
        return self.advantage_clip

    def unclamped(self) -> ClampedConfig:
        return replace(self, advantage_clip=math.inf)


@dataclass(frozen=True)
class ClipConfig(ClampedConfig):
    """Settings of losses with PPO's clip."""

    clip_range: Annotated[float, In("(0, 1)"), "1e-5 to 1e-3 are usual"] = 1e-4
    """The importance ratio is clipped below, at 1 - clip_range; small because log-probs are means over latent
    dims. 1e-4 in Flow-GRPO (SD3.5), 1e-5 in Flow-GRPO-Fast and for Qwen-Image, 1e-3 for Wan. SDE law cps has
    another scale."""
    clip_range_high: Annotated[float | None, In("(0, inf)"), "null takes digen.loss.clip_range"] = None
    """The importance ratio is clipped above, at 1 + clip_range_high. null: clip_range."""

    @property
    def ratio_range(self) -> tuple[float, float]:
        """(1 - clip_range, 1 + clip_range_high)."""
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return 1 - self.clip_range, 1 + high

    @property
    def clip_widths(self) -> Mapping[str, float]:
        high = {} if self.clip_range_high is None else {"clip_range_high": self.clip_range_high}
        return {"clip_range": self.clip_range, **high}
