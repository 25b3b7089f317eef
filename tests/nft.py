# SPDX-License-Identifier: Apache-2.0
"""DiffusionNFT's loss of one row, in fp64 and by the paper's formula."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl_digen.algorithms.objectives.diffusion_nft import DiffusionNftConfig


def slow_row(values: Mapping[str, Tensor], config: DiffusionNftConfig) -> Tensor:
    """[] loss of one row, from its inputs without a batch dimension; advantages are clamped at 5."""
    values = {name: value.double() for name, value in values.items()}
    share = max(0.0, min(1.0, max(-5.0, min(5.0, values["advantage"].item())) / 10 + 0.5))
    velocity, old, beta = values["velocity"], values["old_velocity"], config.beta

    def error(implicit: Tensor) -> Tensor:
        wrong = values["noisy"] - values["sigma"] * implicit - values["clean"]
        return (wrong**2).mean() / max(1e-5, wrong.abs().mean().item())

    positive = error(beta * velocity + (1 - beta) * old)
    negative = error((1 + beta) * old - beta * velocity)
    policy = 5 * (share * positive + (1 - share) * negative) / beta
    return policy + config.kl_coef * torch.mean((velocity - values["reference_velocity"]) ** 2)
