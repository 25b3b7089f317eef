# SPDX-License-Identifier: Apache-2.0
"""Step cache: the velocity of the last network evaluation again, where it is predicted to have changed little.

With two evaluations v1 at sigma1 and v2 at sigma2 < sigma1 of a row, the velocity changes by

    rate = |v2 - v1| / (|v2| (sigma1 - sigma2))         of its norm per unit of sigma

and a step at sigma takes v2 again if rate (sigma2 - sigma) < threshold. Norms are over all latent dims of a row.

A stochastic step always evaluates the network: its log-prob is recorded. A velocity is never taken again after a
stochastic step (the noise has moved x), by another expert of the model, or more than `max_skips` times in a row. The
rate is taken from the last two evaluations, also within a window: noise between them makes it larger, so that more
steps are evaluated. A row decides by its own velocities alone, but batches round differently, so a prediction that is
within this rounding of the threshold can fall on either side of it.

Source: the prediction of EasyCache (arXiv 2507.02860), |change of output| = k |change of input|, for Euler steps of
flow matching, where |change of input| is |v| (sigma2 - sigma). EasyCache takes the output less the input again, and
TeaCache (arXiv 2411.19108) fits a polynomial to each network; here nothing depends on the network.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Known:
    """Last evaluation of a row."""

    velocity: Tensor
    """[...] fp32."""
    sigma: float
    expert: int
    rate: float
    """Relative change of the velocity per unit of sigma; infinite before the second evaluation, after a stochastic
    step, and of a velocity that is 0."""
    num_skips: int = 0
    """Steps that took it again."""


class StepCache:
    """Velocities of the rows of a batch, from step to step, by `digen.sampling.outside.cache` (0 keeps nothing) and
    `cache_max_skips`.

    Example:
        cache = StepCache(0.1, 2)
        ode = [False, False]
        cache.reusable([0, 1], ode, 0.9, 0)              # (False, False): nothing is known
        cache.put([(0,), (1,)], velocity, 0.9, 0)
        cache.reusable([0, 1], ode, 0.8, 0)              # (False, False): no rate yet
        cache.put([(0,), (1,)], velocity, 0.8, 0)
        cache.reusable([0, 1], ode, 0.7, 0)              # (True, False): row 1's velocity changes faster
        cache.reusable([0, 1], [True, False], 0.7, 0)    # (False, False): row 0's step is stochastic
        cache.take([0], [(0,)])                          # [1, ...] row 0's velocity at 0.8
        cache.disturb([1])                               # row 1 took a stochastic step
    """

    def __init__(self, threshold: float, max_skips: int):
        self._threshold = threshold
        self._max_skips = max_skips
        self._known: dict[int, _Known] = {}

    @property
    def is_on(self) -> bool:
        """True if velocities are kept."""
        return self._threshold > 0

    def reusable(self, rows: Sequence[int], is_sde: Sequence[bool], sigma: float, expert: int) -> tuple[bool, ...]:
        """True for each row that takes its last velocity again; `sigma` and `expert` are the step's."""
        return tuple(
            not sde and row in self._known and self._is_near(self._known[row], sigma, expert)
            for row, sde in zip(rows, is_sde, strict=True)
        )

    def take(self, rows: Sequence[int], alike: Sequence[Sequence[int]]) -> Tensor:
        """Last velocities [N, ...] of N rows. Each entry of `alike` holds the rows that share one's step (itself, and
        in a tree those that equal it), for all of which it counts as taken again."""
        for members in alike:
            for row in members:
                known = self._known[row]
                self._known[row] = replace(known, num_skips=known.num_skips + 1)
        return torch.stack([self._known[row].velocity for row in rows])

    def put(self, alike: Sequence[Sequence[int]], velocity: Tensor, sigma: float, expert: int) -> None:
        """Keep evaluated velocities [N, ...] of N lanes of rows; see `take`."""
        if not self.is_on or not alike:
            return
        made = velocity.float()
        before = [self._known.get(members[0]) for members in alike]
        if all(known is None for known in before):
            rates = [math.inf] * len(alike)
        else:
            earlier = torch.stack(
                [now if known is None else known.velocity for now, known in zip(made, before, strict=True)]
            )
            change, norm = _norm(made - earlier), _norm(made)
            rates = [
                change_of / (norm_of * (known.sigma - sigma)) if known is not None and norm_of > 0 else math.inf
                for change_of, norm_of, known in zip(change.tolist(), norm.tolist(), before, strict=True)
            ]
        for members, now, rate in zip(alike, made, rates, strict=True):
            for row in members:
                self._known[row] = _Known(now, sigma, expert, rate)

    def disturb(self, rows: Sequence[int]) -> None:
        """Note that rows took a stochastic step: their last velocities belong to another x."""
        for row in rows:
            if row in self._known:
                self._known[row] = replace(self._known[row], rate=math.inf)

    def _is_near(self, known: _Known, sigma: float, expert: int) -> bool:
        if known.expert != expert or known.num_skips >= self._max_skips:
            return False
        return known.rate * (known.sigma - sigma) < self._threshold


def _norm(rows: Tensor) -> Tensor:
    """[N, ...] fp32 -> [N] on the host, which costs an accelerator one synchronisation."""
    return rows.flatten(1).norm(dim=1).cpu()
