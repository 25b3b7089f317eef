# SPDX-License-Identifier: Apache-2.0
"""Forward points: noise levels at which clean latents are noised again, x = (1 - sigma) x_0 + sigma noise.

- Levels are drawn once per group, as a function of (run seed, uid): samples of a group could not be compared at
  different levels.
- The noise of a row is a function of (run seed, uid, sample, point), so that it is the same on every rank.

Sources: DiffusionNFT, arXiv 2509.16117 (levels of the sampling schedule).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from verl_digen.algorithms.noise import sample_seed, step_noise
from verl_digen.algorithms.seeds import keyed_seed
from verl_digen.require import require


@dataclass(frozen=True)
class NoiseLevels:
    """The noise levels of one group, one per point."""

    steps: tuple[int, ...]
    """Denoise steps whose sigmas they are, ascending."""


@dataclass(frozen=True)
class ForwardConfig:
    """`digen.forward`: the points of objectives that noise finished pictures again (diffusion_nft). Others train
    `digen.window`."""

    fraction: float = 0.99
    """Share of the sampling schedule's noise levels at which each sample trains, rounded down, at least one; which
    ones differs from group to group. 0.99 in DiffusionNFT: all but one."""
    num_points: int | None = None
    """Number of these levels in place of the share. null: `fraction` decides."""

    def __post_init__(self) -> None:
        require(
            0 < self.fraction <= 1,
            "digen.forward.fraction must lie in (0, 1]",
            self.fraction,
            "0.99 is DiffusionNFT's",
        )
        require(
            self.num_points is None or self.num_points >= 1,
            "digen.forward.num_points must be >= 1 or null",
            self.num_points,
            "null takes digen.forward.fraction of the steps",
        )

    def count(self, num_steps: int) -> int:
        """Number of points of a sample that was denoised in `num_steps`.

        Raises:
            ValueError: there are not as many noise levels.
        """
        if self.num_points is None:
            return max(1, int(self.fraction * num_steps))
        require(
            self.num_points <= num_steps,
            f"digen.forward.num_points must be <= digen.sampling.num_steps={num_steps}, the noise levels that there "
            "are",
            self.num_points,
            "lower it, or sample more steps",
        )
        return self.num_points


def draw_noise_levels(config: ForwardConfig, *, run_seed: int, uid: str, num_steps: int) -> NoiseLevels:
    """The noise levels of group `uid`.

    Raises:
        ValueError: there are fewer than the config asks for.
    """
    rng = random.Random(keyed_seed("noise levels", int(run_seed), str(uid)))
    return NoiseLevels(tuple(sorted(rng.sample(range(num_steps), config.count(num_steps)))))


def point_noise(run_seed: int, uid: str, sample_index: int, point: int, shape: Sequence[int]) -> Tensor:
    """Noise of point `point` of a sample, of `shape`, fp32 on the CPU."""
    seed = keyed_seed("forward", sample_seed(run_seed, uid, sample_index))
    return step_noise(seed, point, shape)
