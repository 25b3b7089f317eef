# SPDX-License-Identifier: Apache-2.0
"""`diffusion_nft`: negative-aware fine-tuning on the forward process. Needs final latents alone, no SDE, no log-probs.

Two implicit policies surround the old one: v+ moves from v_old towards v, v- as far away from it. A sample of high
reward trains v+ to predict it, a sample of low reward v-. Samples come from policy `old`, an EMA copy.

Source: DiffusionNFT, arXiv 2509.16117; schedules and modes as in its code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from verl_digen.algorithms.ema import Decay
from verl_digen.algorithms.objectives.objective import ClampedConfig, register_objective
from verl_digen.algorithms.objectives.ratio import clamped_advantage
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.algorithms.sde import latent_mean
from verl_digen.require import In, OneOf

MODES = ("all", "positive_only", "negative_only", "one_only", "binary")
OLD_POLICIES = {"copy": Decay(0.0, 0.0), "linear": Decay(0.001, 0.5), "delayed": Decay(0.0075, 0.999, start=75)}
"""`old_policy` -> decay of the old policy after k optimizer steps."""


@dataclass(frozen=True)
class DiffusionNftConfig(ClampedConfig):
    advantage_clip: Annotated[float, In("(0, inf)"), "5 is DiffusionNFT's; the loss divides by it"] = 5.0
    beta: Annotated[float, In("(0, inf)"), "0.1 to 1 is usual"] = 1.0
    """Distance of v+ and v- from v_old, in units of v - v_old. 1 (GenEval, PickScore), 0.1 (OCR, several rewards)."""
    kl_coef: Annotated[float, In("[0, inf)"), "1e-4 is DiffusionNFT's; 0 switches it off"] = 1e-4
    """Weight of mean[(v - v_ref)^2]. 0 saves the reference's forward."""
    mode: Annotated[str, OneOf(MODES)] = "all"
    """Advantages that train: all; positive_only or negative_only (the others count as 0); one_only (1 where positive,
    else 0); binary (their signs)."""
    old_policy: Annotated[str, OneOf(OLD_POLICIES)] = "linear"
    """Decay of the old policy after k optimizer steps. copy: 0. linear: min(0.001 k, 0.5) (GenEval, PickScore).
    delayed: 0 up to step 75, then min(0.0075 (k - 75), 0.999) (OCR, several rewards)."""

    @property
    def more_latents(self) -> tuple[str, ...]:
        return ("reference_velocity",) if self.kl_coef > 0 else ()

    @property
    def copies(self) -> Mapping[str, Decay]:
        return {"old": OLD_POLICIES[self.old_policy]}


@register_objective(
    "diffusion_nft",
    config=DiffusionNftConfig,
    points="forward",
    columns=("advantage", "sigma"),
    latents=("clean", "noisy", "velocity", "old_velocity"),
    behaviour="old",
    off_policy=True,
)
def implicit_policies(rows: LossInputs, config: DiffusionNftConfig) -> LossOutput:
    """clip * mean[r l+ / beta + (1 - r) l- / beta] + kl_coef mean[(v - v_ref)^2].

    r = clamp(A, +- clip) / (2 clip) + 1/2, in [0, 1]; v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v;
    l = mean[(x - x_0)^2] / max(1e-5, sg mean|x - x_0|) of the prediction x = x_t - sigma v.
    """
    share = optimality(clamped_advantage(rows, config), config)
    velocity, old = rows["velocity"], rows["old_velocity"]
    towards = config.beta * (velocity - old)
    positive = _weighted_error(rows, old + towards)
    negative = _weighted_error(rows, old - towards)
    per_row = config.advantage_clip * (share * positive + (1 - share) * negative) / config.beta
    metrics = {
        "optimality": rows.mean_metric(share),
        "positive_error": rows.mean_metric(positive),
        "negative_error": rows.mean_metric(negative),
        "old_distance": rows.mean_metric(latent_mean((velocity - old).square())),
    }
    if config.kl_coef > 0:
        divergence = latent_mean((velocity - rows["reference_velocity"]).square())
        per_row = per_row + config.kl_coef * divergence
        metrics["reference_distance"] = rows.mean_metric(divergence)
    return LossOutput(rows.mean(per_row), metrics)


def optimality(advantage: Tensor, config: DiffusionNftConfig) -> Tensor:
    """Share r in [0, 1] of the positive policy, from clamped advantages [N]."""
    if config.mode == "positive_only":
        advantage = advantage.clamp(min=0)
    elif config.mode == "negative_only":
        advantage = advantage.clamp(max=0)
    elif config.mode == "one_only":
        advantage = (advantage > 0).float()
    elif config.mode == "binary":
        advantage = advantage.sign()
    return (advantage / (2 * config.advantage_clip) + 0.5).clamp(0, 1)


def _weighted_error(rows: LossInputs, velocity: Tensor) -> Tensor:
    """Squared error of the predicted clean latents, over their mean absolute error in fp64; [N]."""
    clean = rows["clean"]
    sigma = rows["sigma"].reshape(-1, *(1,) * (clean.dim() - 1))
    error = rows["noisy"] - sigma * velocity - clean
    with torch.no_grad():
        weight = latent_mean(error.abs().double()).clamp(min=1e-5)
    return (latent_mean(error.square()) / weight).float()
