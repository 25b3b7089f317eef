# SPDX-License-Identifier: Apache-2.0
"""Forward points: noise levels at which clean latents are noised again, x = (1 - sigma) x_0 + sigma noise.

Levels are drawn once per group, as a function of (run seed, uid): samples of a group could not be compared at different
levels. A level of kind `logit_normal` lies at share sigmoid(z) of the schedule, z standard normal (flow_grpo's
Flow-DPO).
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

from verl_digen.algorithms.noise import keyed_seed, sample_seed, step_noise
from verl_digen.require import In, OneOf, Section, require, require_value

KINDS = ("steps", "strata", "logit_normal")


@dataclass(frozen=True)
class NoiseLevels:
    """The noise levels of one group, one per point."""

    steps: tuple[float, ...]
    """Positions in the schedule, ascending: 2 is the sigma of denoise step 2, 2.5 lies halfway to step 3's."""

    def sigmas(self, schedule: Tensor) -> Tensor:
        """[K] the levels in a schedule of T steps, [T+1] fp32; linear between two steps."""
        starts = [math.floor(step) for step in self.steps]
        below, above = schedule[starts], schedule[[start + 1 for start in starts]]
        return torch.lerp(below, above, torch.tensor(self.steps).to(schedule) - torch.tensor(starts).to(schedule))


@dataclass(frozen=True)
class ForwardConfig(Section, key="digen.forward"):
    """`digen.forward`: the noise levels of forward objectives (diffusion_nft, awm, dgpo, online_dpo, offline_dpo).
    Others train `digen.window`."""

    kind: Annotated[str, OneOf(KINDS)] = "steps"
    """steps: levels of distinct denoise steps (DiffusionNFT, DGPO). strata: the steps are cut into as many equal parts
    as there are points, and each part gives one level (AWM). logit_normal: levels between the steps, mostly in the
    middle of the schedule (online DPO)."""
    fraction: Annotated[float, In("(0, 1]")] = 0.99
    """Share of the steps whose noise levels train, rounded down, at least one; drawn for each group. 0.99 in
    DiffusionNFT: all but one."""
    num_points: Annotated[int | None, In("[1, inf]"), "null takes digen.forward.fraction of the steps"] = None
    """Number of levels, instead of `fraction`. null: `fraction` decides."""
    first_step: Annotated[int, In("[0, inf]"), "0 is the step of pure noise"] = 0
    """steps and strata: first denoise step whose level may be drawn. 1 in AWM, which omits pure noise."""
    until: Annotated[float, In("(0, 1]"), "1 draws from the whole schedule"] = 1.0
    """steps and strata: draw levels from this share of the schedule, beginning at pure noise, rounded down to steps.
    0.9 in AWM; 0.7 in DGPO, 7 steps of 10."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "logit_normal":
            why = "with digen.forward.kind=logit_normal, which draws from all steps"
            require_value("digen.forward.first_step", self.first_step, 0, why, "leave it out")
            require_value("digen.forward.until", self.until, 1.0, why, "leave it out")

    def steps_for(self, num_steps: int) -> range:
        """Denoise steps whose levels may be drawn, of `num_steps`. ValueError if there is none."""
        steps = range(self.first_step, int(self.until * num_steps))
        require(
            len(steps) > 0,
            "digen.forward.first_step must be below digen.forward.until x digen.sampling.num_steps, which is "
            f"{self.until:g} x {num_steps}, rounded down {int(self.until * num_steps)}",
            self.first_step,
            "lower it, raise digen.forward.until, or sample more steps",
        )
        return steps

    def count(self, num_steps: int) -> int:
        """Number of points of a sample that was denoised in `num_steps`. ValueError if there are fewer noise levels."""
        num_levels = len(self.steps_for(num_steps))
        if self.num_points is None:
            return max(1, int(self.fraction * num_levels))
        if self.kind == "logit_normal":
            return self.num_points
        whole = num_levels == num_steps
        require(
            self.num_points <= num_levels,
            f"digen.forward.num_points must be <= digen.sampling.num_steps={num_steps}, the noise levels that there are"
            if whole
            else f"digen.forward.num_points must be <= {num_levels}, the steps that digen.forward.first_step and "
            f"digen.forward.until leave of digen.sampling.num_steps={num_steps}",
            self.num_points,
            "lower it, or sample more steps",
        )
        return self.num_points


def draw_noise_levels(config: ForwardConfig, *, run_seed: int, uid: str, num_steps: int) -> NoiseLevels:
    """The noise levels of group `uid`. ValueError if there are fewer than the config asks for.

    Example:
        draw_noise_levels(ForwardConfig("strata", num_points=6, first_step=1, until=0.9), ..., num_steps=14)
        # one level of each of the steps 1 | 2, 3 | 4, 5 | 6, 7 | 8, 9 | 10, 11
    """
    rng = random.Random(keyed_seed("noise levels", int(run_seed), str(uid)))
    count, steps = config.count(num_steps), config.steps_for(num_steps)
    if config.kind == "logit_normal":
        shares = [1 / (1 + math.exp(-rng.gauss(0, 1))) for _ in range(count)]
        return NoiseLevels(tuple(sorted(share * num_steps for share in shares)))
    if config.kind == "strata":
        bounds = [steps.start + len(steps) * part // count for part in range(count + 1)]
        return NoiseLevels(tuple(rng.randrange(*part) for part in pairwise(bounds)))
    return NoiseLevels(tuple(sorted(rng.sample(steps, count))))


def point_noise(run_seed: int, uid: str, sample_index: int, point: int, shape: Sequence[int]) -> Tensor:
    """Noise of point `point` of a sample, of `shape`, fp32 on the CPU: the same on every rank."""
    seed = keyed_seed("forward", sample_seed(run_seed, uid, sample_index))
    return step_noise(seed, point, shape)
