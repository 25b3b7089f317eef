# SPDX-License-Identifier: Apache-2.0
"""Size of the gradient's entries against Adam's eps.

Adam divides by sqrt(v) + eps, where sqrt(v) is about the root mean square (RMS) of a gradient entry over steps. Where
that is large against eps the step does not depend on the gradient's scale; where it is small the parameter hardly
moves, whatever the learning rate.

Invariant (tests/engine/test_two_ranks_fragments.py): the same on any number of ranks, however shards are replicated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from verl_digen.engine.gathered import reshard
from verl_digen.engine.shadow import local_shard

FREE_OF_EPS = 10.0
"""RMS over eps from which a parameter counts as free of eps: eps is at most a tenth of Adam's denominator."""


@dataclass(frozen=True)
class GradientSizes:
    """Sizes of the trained parameters' gradients, before clipping."""

    squares: tuple[float, ...]
    """Sum of squares of each parameter's gradient."""
    counts: tuple[int, ...]
    """Elements of each parameter."""

    @property
    def moved(self) -> list[tuple[float, int]]:
        """(sum of squares, elements) of each parameter that has a gradient: Adam does not step for the others."""
        return [(square, count) for square, count in zip(self.squares, self.counts, strict=True) if square > 0]

    def rms(self) -> float:
        """Root mean square of the entries; 0 without gradient."""
        return math.sqrt(sum(self.squares) / max(1, sum(count for _, count in self.moved)))

    def share_below(self, bound: float) -> float:
        """Share of elements in parameters whose RMS is below `bound`; 0 without gradient."""
        below = sum(count for square, count in self.moved if square / count < bound**2)
        return below / max(1, sum(count for _, count in self.moved))


@torch.no_grad()
def gradient_sizes(module: nn.Module) -> GradientSizes:
    """Sizes of the reduced gradient, over all ranks. Collective: one all-reduce, and one read of the device."""
    reshard(module)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    shares = []
    for parameter in trained:
        if parameter.grad is None:
            shares.append(torch.zeros((), device=parameter.device))
        else:
            norm = torch.linalg.vector_norm(local_shard(parameter.grad), dtype=torch.float32)
            shares.append(norm.square() / _num_copies(parameter))
    squares = torch.stack(shares)
    dist.all_reduce(squares)
    return GradientSizes(tuple(squares.tolist()), tuple(parameter.numel() for parameter in trained))


def _num_copies(parameter: torch.Tensor) -> int:
    """Number of ranks that hold the same shard."""
    assert isinstance(parameter, DTensor)
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_shard())


def eps_numbers(sizes: GradientSizes, *, eps: float, clip_factor: float) -> dict[str, float]:
    """`grad_rms`, `grad_rms_to_eps` and `eps_bound_share` of the gradient that Adam sees.

    Args:
        clip_factor: factor by which clipping shortened the gradient, at most 1.
    """
    rms = sizes.rms() * clip_factor
    return {
        "grad_rms": rms,
        "grad_rms_to_eps": rms / eps if eps else math.inf,
        "eps_bound_share": sizes.share_below(FREE_OF_EPS * eps / clip_factor),
    }
