# SPDX-License-Identifier: Apache-2.0
"""Interface of a solver: a function `Schedule -> Terms` of noise levels alone, on the host in fp64.

    x' = x + v (sigma' - sigma) + x_weight x + clean_weight x_0 + newest (x_0 - x_0_prev)
         + older (x_0_prev - x_0_prev2) + std z                          x_0 = x - sigma v

A corrector moves x by differences of the same predictions before the step is taken, so it is part of `newest` and
`older`, and takes no memory of latents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SolverNoise:
    """Noise of a stochastic solver: `level` where the step ends at a sigma in [low, high], else none."""

    level: float
    low: float
    high: float

    def at(self, sigma: Tensor) -> Tensor:
        """Tau of steps that end at these sigmas, [N] fp64."""
        inside = (sigma >= self.low) & (sigma <= self.high)
        return torch.where(inside, self.level, 0.0).double()


NO_NOISE = SolverNoise(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Prediction:
    """Predictions of x_0 at the last two steps of N rows."""

    clean: Tensor
    """[N, ...] fp32, at the last step."""
    sigma: Tensor
    """[N] fp64 on the host: noise level at which it was made."""
    earlier: Tensor
    """[N, ...] fp32, at the step before the last one."""
    earlier_sigma: Tensor
    """[N] fp64 on the host."""
    count: Tensor
    """[N] int64 on the host: steps of the solver since the start or the last stochastic step; predictions of steps
    before these are never read."""

    def rows(self, chosen: Sequence[int]) -> Prediction:
        """The predictions of the rows `chosen`, in that order."""
        index = list(chosen)
        return Prediction(*(column[index] for column in vars(self).values()))

    @staticmethod
    def join(parts: Sequence[Prediction]) -> Prediction | None:
        """The rows of all parts, one after the other; None without parts."""
        if not parts:
            return None
        return Prediction(*map(torch.cat, zip(*(vars(one).values() for one in parts), strict=True)))


@dataclass(frozen=True)
class Schedule:
    """Noise levels of one step of N rows, and of the steps before it; [N] fp64 on the host."""

    start: Tensor
    end: Tensor
    before: Tensor
    """Sigma of `Prediction.clean`; any number where `count` is 0."""
    earlier: Tensor
    """Sigma of `Prediction.earlier`; any number where `count` is below 2."""
    count: Tensor
    """[N] int64: predictions that may be read."""
    noise: SolverNoise


NONE = torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class Terms:
    """Weights of a step, [N] or [] fp64 on the host each; the formula is in this file's docstring."""

    newest: Tensor
    older: Tensor = NONE
    x_weight: Tensor = NONE
    clean_weight: Tensor = NONE
    std: Tensor = NONE


Solver = Callable[[Schedule], Terms]


def log_ratio(sigma: Tensor) -> Tensor:
    """lambda = ln((1 - sigma) / sigma): -inf at sigma 1, inf at sigma 0."""
    return torch.log1p(-sigma) - torch.log(sigma)
