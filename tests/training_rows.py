# SPDX-License-Identifier: Apache-2.0
"""Rows of recorded steps, for tests of their replay."""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_digen.types import Condition, TrainingRows, Trajectory, Transitions


def rows_of(
    trajectories: Sequence[Trajectory],
    pairs: Sequence[tuple[int, int]],
    conditions: Sequence[Condition],
    negatives: Sequence[Condition] | None,
) -> TrainingRows:
    """A row per (trajectory, trained step) of `pairs`, in their order; conditions are per trajectory."""
    records = [trajectory.record for trajectory in trajectories]

    def gather(column: str) -> Tensor:
        return torch.stack([getattr(records[n], column)[k] for n, k in pairs])

    def latents(offset: int) -> Tensor:
        return torch.stack([records[n].latents[records[n].positions[k] + offset] for n, k in pairs])

    return TrainingRows(
        latents=latents(0),
        sigmas=gather("sigmas"),
        point=Transitions(
            next_latents=latents(1),
            next_sigmas=gather("next_sigmas"),
            sigma_max=torch.stack([records[n].sigma_max for n, _ in pairs]),
            log_probs=gather("log_probs"),
        ),
        conditions=[conditions[n] for n, _ in pairs],
        negative_conditions=None if negatives is None else [negatives[n] for n, _ in pairs],
        advantages=torch.ones(len(pairs)),
        mask=torch.ones(len(pairs)),
        sampling=trajectories[0].facts.sampling,
    )
