# SPDX-License-Identifier: Apache-2.0
"""Policy losses over rows, by name.

* A loss is a function of checked `Rows` and a `LossConfig`. `register_loss` files it under its names with
  the inputs it needs; `policy_loss` looks it up, checks the inputs and calls it.
* Losses reduce with `Rows.mean` only, so they add up over tiles and fragments (see `rows`).

Invariant: while `advantage_clip` does not bind, a loss that is filed as `homogeneous` is positively homogeneous in
the advantage, loss(c A) = c loss(A) for c > 0. So the scale of advantages may be applied to an accumulated gradient
instead, and `digen.advantage.scale=batch` does not make training wait for the whole batch's rewards.

Example, a loss of one's own:

    @register_loss("reinforce", columns=("log_prob", "advantage"), homogeneous=True)
    def reinforce(rows: Rows, config: LossConfig) -> LossOutput:
        return LossOutput(rows.mean(-rows["advantage"] * rows["log_prob"]), {})
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_digen.algorithms.rows import LossOutput, Rows

__all__ = [
    "LossConfig",
    "LossOutput",
    "Rows",
    "is_homogeneous",
    "loss_inputs",
    "loss_names",
    "policy_loss",
    "register_loss",
]


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
        if not 0 < self.clip_range < 1:
            raise ValueError(f"digen.loss.clip_range must lie in (0, 1), got {self.clip_range}; 1e-5 to 1e-3 are usual")
        if self.clip_range_high is not None and not 0 < self.clip_range_high < math.inf:
            raise ValueError(
                f"digen.loss.clip_range_high must be > 0 and finite, got {self.clip_range_high}; "
                "null takes digen.loss.clip_range"
            )
        if not self.advantage_clip > 0:
            raise ValueError(f"digen.loss.advantage_clip must be > 0, got {self.advantage_clip}; .inf never clamps")

    @property
    def ratio_range(self) -> tuple[float, float]:
        """(1 - clip_range, 1 + clip_range_high)."""
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return 1 - self.clip_range, 1 + high


LossFn = Callable[[Rows, LossConfig], LossOutput]


@dataclass(frozen=True)
class _Loss:
    compute: LossFn
    columns: tuple[str, ...]
    latents: tuple[str, ...]
    homogeneous: bool


_LOSSES: dict[str, _Loss] = {}


def register_loss(
    *names: str, columns: Sequence[str] = (), latents: Sequence[str] = (), homogeneous: bool = False
) -> Callable[[LossFn], LossFn]:
    """File a loss under `names`, with the `columns` [N] and `latents` [N, ...] it needs, at least one.

    Args:
        homogeneous: loss(c A) = c loss(A) for every c > 0, clamping of A apart. False is always safe: with a scale of
            advantages that only the whole batch has, such a loss waits for the batch.

    Raises:
        ValueError: a name is taken.
    """

    def file(compute: LossFn) -> LossFn:
        for name in names:
            if name in _LOSSES:
                raise ValueError(f"a policy loss named {name!r} exists already; choose another name")
            _LOSSES[name] = _Loss(compute, tuple(columns), tuple(latents), homogeneous)
        return compute

    return file


def loss_names() -> tuple[str, ...]:
    """The names that `policy_loss` knows, sorted."""
    return tuple(sorted(_LOSSES))


def loss_inputs(name: str) -> tuple[str, ...]:
    """The inputs that loss `name` needs. ValueError where there is no such loss."""
    return (*_find(name).columns, *_find(name).latents)


def is_homogeneous(name: str) -> bool:
    """Whether loss `name` grows in proportion to the advantage; see the module. ValueError where it is unknown."""
    return _find(name).homogeneous


def policy_loss(name: str, inputs: Mapping[str, Tensor], config: LossConfig) -> LossOutput:
    """Loss `name` of N rows, as their share of the logical batch's mean.

    Args:
        inputs: those that `loss_inputs(name)` lists; optionally `mask` [N], 0 or False in padding rows, and
            `num_rows`, the unmasked rows of the whole logical batch, a number or [] (default: the unmasked
            rows here).

    Raises:
        ValueError: unknown loss; an input is missing or misshapen.
    """
    loss = _find(name)
    rows = Rows.check(f"policy loss {name!r}", inputs, columns=loss.columns, latents=loss.latents)
    return loss.compute(rows, config)


def _find(name: str) -> _Loss:
    if name not in _LOSSES:
        raise ValueError(f"unknown policy loss {name!r}; known losses: {', '.join(loss_names())}")
    return _LOSSES[name]


@register_loss("flow_grpo", "dance_grpo", columns=("log_prob", "old_log_prob", "advantage"), homogeneous=True)
def clipped_ratio(rows: Rows, config: LossConfig) -> LossOutput:
    """PPO's clip: mean[max(-A r, -A clamp(r, 1 - c, 1 + c'))], r = exp(log_prob - old_log_prob)."""
    low, high = config.ratio_range
    advantage = rows["advantage"].clamp(-config.advantage_clip, config.advantage_clip)
    ratio = (rows["log_prob"] - rows["old_log_prob"]).exp()
    per_row = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
    return LossOutput(rows.mean(per_row), ratio_metrics(rows, config))


@torch.no_grad()
def ratio_metrics(rows: Rows, config: LossConfig) -> dict[str, Tensor]:
    """How far the policy is from the one that sampled.

    `ratio_deviation`, `_min`, `_max` are of r - 1 (its digits would drown in r), `clip_fraction` the share of
    rows with r outside the clip range, `approx_kl` the mean of half the squared log-ratio.
    """
    low, high = config.ratio_range
    log_ratio = rows["log_prob"] - rows["old_log_prob"]
    ratio, deviation = log_ratio.exp(), log_ratio.expm1()
    return {
        "ratio_deviation": rows.mean(deviation),
        "ratio_deviation_min": rows.min(deviation),
        "ratio_deviation_max": rows.max(deviation),
        "clip_fraction": rows.mean(((ratio < low) | (ratio > high)).float()),
        "approx_kl": rows.mean(0.5 * log_ratio.square()),
    }
