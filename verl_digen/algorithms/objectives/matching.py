# SPDX-License-Identifier: Apache-2.0
"""Shared parts of losses at forward points: flow-matching errors, and rows of a group at one noise level."""

import torch
from torch import Tensor

from verl_digen.algorithms.objectives.objective import JointRows
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


def sums_together(rows: JointRows, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sum values [M] over the rows of each row's group at its point: (the sums [M], numbers of these rows [M])."""
    pairs = torch.stack([rows.groups, rows.points], 1)
    _, places, counts = pairs.unique(dim=0, return_inverse=True, return_counts=True)
    return values.new_zeros(len(counts)).index_add(0, places, values)[places], counts[places]
