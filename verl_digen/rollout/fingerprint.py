# SPDX-License-Identifier: Apache-2.0
"""Fingerprint of a network: a few numbers computed on fixed inputs; see `verl_digen.weights.probe`.

One forward per network of the checkpoint on one 64 x 64 px picture, or a wider one whose tokens several devices can
share: noise from a fixed seed, at a noise level that the
network handles, with the conditions of a fixed prompt. (A `vllm_omni` replica generates that picture instead:
`verl_digen.rollout.vllm_omni.probing`.)

Invariants (tests/rollout/test_fingerprint.py): the same weights give bitwise the same numbers; any change of any
network's weights that changes its output changes them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from verl_digen.algorithms.noise import INITIAL_LATENTS, step_noise
from verl_digen.algorithms.projection import project
from verl_digen.models.base import DiffusionModel
from verl_digen.types import Condition, Geometry

PROMPT = "a photograph of a red apple on a wooden table"
GEOMETRY = Geometry(64, 64)
"""Size that every architecture supports."""
SEED = 20_240_229
NOISE_LEVELS = (0.95, 0.75, 0.5, 0.25, 0.05)
"""Sigmas; each network runs at the first one in its own range."""


@torch.no_grad()
def fingerprint(model: DiffusionModel, transformer: nn.Module, condition: Condition) -> tuple[float, ...]:
    """Root mean square and ±1 projection of the velocity, for each network of the checkpoint in order.

    Args:
        transformer: the replica's, in eval mode. condition: conditions of `PROMPT`, on the transformer's device.
    """
    device = next(transformer.parameters()).device
    geometry = replace(GEOMETRY, width_px=GEOMETRY.width_px * model.sequence_size)
    shape = model.latent_shape(geometry)
    latents = step_noise(SEED, INITIAL_LATENTS, shape)[None].to(device)
    sigmas = torch.tensor(NOISE_LEVELS)
    asked = dict(zip(reversed(model.expert_of(sigmas).tolist()), reversed(NOISE_LEVELS), strict=True))
    numbers: list[float] = []
    for _, sigma in sorted(asked.items()):
        velocity = model.velocity(
            transformer, latents, torch.tensor([sigma]), [condition], None, true_cfg_scale=1.0, geometry=geometry
        )
        numbers += summary(velocity)
    return tuple(numbers)


def summary(velocity: Tensor) -> tuple[float, float]:
    """Root mean square and ±1 projection, each relative to the root of the number of elements."""
    values = velocity.cpu().double()
    root = math.sqrt(values.numel())
    return values.norm().item() / root, project("velocity", values).item() / root
