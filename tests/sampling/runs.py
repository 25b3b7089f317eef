# SPDX-License-Identifier: Apache-2.0
"""Batches of a sampler on the CPU, and comparisons of their samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl_digen.models.base import DiffusionModel
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import Condition, PathRecord, SampleRequest, Trajectory

RUN_SEED = 7


@dataclass
class Run:
    """One batch."""

    trajectories: list[Trajectory]
    latents: Tensor
    """[B, ...], final."""
    sizes: list[int]
    """Rows of each forward."""

    @property
    def num_skipped(self) -> list[int]:
        return [one.facts.num_skipped_steps for one in self.trajectories]

    @property
    def num_shared(self) -> list[int]:
        return [one.facts.num_shared_steps for one in self.trajectories]


def run(
    model: DiffusionModel,
    network: nn.Module,
    requests: Sequence[SampleRequest],
    conditions: Sequence[Condition] | Condition,
    negative: Sequence[Condition] | None = None,
    *,
    version: int = 0,
    **how: Any,
) -> Run:
    """Sample one batch.

    Args:
        conditions: per request, or one of all. how: arguments of the sampler.
    """
    how = {"run_seed": RUN_SEED, "device": torch.device("cpu"), "latents_dtype": torch.float32, **how}
    given = [conditions] * len(requests) if isinstance(conditions, dict) else conditions
    sizes: list[int] = []
    handle = network.register_forward_pre_hook(
        lambda module, args, inputs: sizes.append(len(inputs["hidden_states"])), with_kwargs=True
    )
    trajectories, latents = Sampler(model, network, **how).sample(requests, given, negative, version=version)
    handle.remove()
    return Run(trajectories, latents, sizes)


def path_of(trajectory: Trajectory) -> PathRecord:
    assert isinstance(trajectory.record, PathRecord)
    return trajectory.record


def assert_bitwise(found: Trajectory, expected: Trajectory) -> None:
    for name, column in expected.record.columns().items():
        assert torch.equal(found.record.columns()[name], column), name


def close(actual: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    """Require equality up to the rounding of fp32, which grows with the largest value."""
    torch.testing.assert_close(actual, expected, atol=atol * max(1.0, expected.abs().max().item()), rtol=0)


def close_columns(found: Trajectory, expected: Trajectory) -> None:
    for name, column in expected.record.columns().items():
        close(found.record.columns()[name], column)
