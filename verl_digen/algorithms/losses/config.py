# SPDX-License-Identifier: Apache-2.0
"""`digen.loss`: the hyper-parameters of all policy losses, each read by the losses its docstring names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_digen.require import require

DEFAULTS = "leave it alone for the default"


@dataclass(frozen=True)
class LossConfig:
    """`digen.loss`: hyper-parameters of the policy losses."""

    clip_range: float = 1e-4
    """The importance ratio is clipped below, at 1 - clip_range; small because log-probs are means over latent
    dims. 1e-4 in Flow-GRPO (SD3.5), 1e-5 in Flow-GRPO-Fast and for Qwen-Image, 1e-3 for Wan. SDE law cps has
    another scale."""
    clip_range_high: float | None = None
    """The importance ratio is clipped above, at 1 + clip_range_high. null: clip_range."""
    advantage_clip: float = 5.0
    """Advantages are clamped to +- this (5 in Flow-GRPO). .inf: no clamping."""
    tis_low: float = 0.0
    """tis: the smallest weight of a row. 0 (ROLL)."""
    tis_high: float = 1.0
    """tis: the largest weight of a row. 1 (ROLL)."""
    cispo_low: float = 0.1
    """cispo: weights are at least 1 - cispo_low. 0.1 (ROLL)."""
    cispo_high: float = 0.1
    """cispo: weights are at most 1 + cispo_high. 0.1 (ROLL)."""
    cispo_mask: bool = False
    """cispo: true also removes the gradient of rows that PPO would clip at the same bounds."""
    topr_threshold: float = 0.0
    """topr, weighted_topr: a sample with a larger reward (the weighted sum, not centred) counts as positive.
    0 (TOPR, whose rewards are +1 and -1). If all rewards are above it, topr is the same as reinforce; if all are below,
    the same as tis: choose it in between."""
    topr_positive_weight: float = 1.0
    """weighted_topr: weight of positive samples. 1 (ROLL), which is topr."""
    topr_negative_weight: float = 1.0
    """weighted_topr: weight of the other samples. 1 (ROLL), which is topr."""
    decoupled_cap: float = 1.2
    """decoupled_ppo: the largest weight of a row. AReaL, for tokens, drops weights above 5."""
    kimi_tau: float = 0.1
    """kimi: tau, the weight of the squared log-ratio. 0.1 (ROLL)."""

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
            "inf (in a file .inf) never clamps",
        )
        require(
            0 <= self.tis_low <= self.tis_high and 0 < self.tis_high < math.inf,
            "digen.loss.tis_low and digen.loss.tis_high must be 0 <= tis_low <= tis_high, with a finite tis_high > 0",
            (self.tis_low, self.tis_high),
            "0 and 1 are usual",
        )
        require(
            0 < self.cispo_low <= 1, "digen.loss.cispo_low must lie in (0, 1]", self.cispo_low, "0.1 is the default"
        )
        for name in ("cispo_high", "topr_positive_weight"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"digen.loss.{name} must be > 0 and finite", value, DEFAULTS)
        for name in ("topr_negative_weight", "kimi_tau"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"digen.loss.{name} must be >= 0 and finite", value, DEFAULTS)
        require(
            1 <= self.decoupled_cap < math.inf,
            "digen.loss.decoupled_cap must be >= 1 and finite, because a sample of the weights before the update has 1",
            self.decoupled_cap,
            DEFAULTS,
        )
        require(
            math.isfinite(self.topr_threshold),
            "digen.loss.topr_threshold must be finite",
            self.topr_threshold,
            "digen.loss_name=reinforce or tis treats all samples alike",
        )

    @property
    def ratio_range(self) -> tuple[float, float]:
        """(1 - clip_range, 1 + clip_range_high)."""
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return 1 - self.clip_range, 1 + high
