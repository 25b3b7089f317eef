# SPDX-License-Identifier: Apache-2.0
"""Shared parts of losses: flow-matching errors at forward points, and sums over rows that belong together."""

import torch
from torch import Tensor

from verl_digen.algorithms.rows import LossInputs
from verl_digen.algorithms.sde import latent_mean

ERRORS = ("clean", "noise", "velocity", "reference_velocity")
"""Latents that `error_gain` reads."""


def flow_error(rows: LossInputs, velocity: str) -> Tensor:
    """[N] mean[(v - (noise - x_0))^2], the flow-matching error of the velocity of this name."""
    return latent_mean((rows[velocity] - (rows["noise"] - rows["clean"])).square())


def error_gain(rows: LossInputs) -> Tensor:
    """[N] flow error of the policy minus the reference's."""
    return flow_error(rows, "velocity") - flow_error(rows, "reference_velocity")


def sums_together(values: Tensor, *ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sum values [M] over the rows that have all of each row's `ids`, [M] int each, e.g. its group's and its point's:
    (the sums [M], numbers of these rows [M])."""
    _, places, counts = torch.stack(ids, 1).unique(dim=0, return_inverse=True, return_counts=True)
    return values.new_zeros(len(counts)).index_add(0, places, values)[places], counts[places]
