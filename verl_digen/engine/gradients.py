# SPDX-License-Identifier: Apache-2.0
"""The gradient of an FSDP2 module in all the places where FSDP2 keeps it: read, scale, move, reduce, drop.

A reduced gradient is in each parameter's `grad`, sharded. An unreduced one is in the unsharded parameter's `grad` and,
in the reduce dtype, in `unsharded_accumulated_grad`; FSDP2 has no public way to reach those two.

Invariants (tests/engine/test_gradients.py): a gradient that was moved out and back, or reduced later, is bitwise the
one that was not; `drop` clears it in every place; the projection is the same on any number of ranks.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from verl.utils.device import get_device_id

from verl_digen.engine.copies import local_shard
from verl_digen.engine.export import plain_name
from verl_digen.engine.fsdp2 import all_groups, parameters_of, reshard
from verl_digen.hardware.torch_support import FSDP2_ACCUMULATES_IN_GRAD

FREE_OF_EPS = 10.0
"""RMS over eps from which a parameter counts as free of eps: eps is at most a tenth of Adam's denominator."""
Gradient = dict[tuple[int, str], Tensor]
"""A gradient outside of its module: (number of the parameter, place) -> piece. Empty: no gradient."""


def _places(module: nn.Module) -> Iterator[tuple[tuple[int, str], Any, str]]:
    """(key, owner, attribute) of every place where a piece of the gradient may be."""
    trained = (parameter for parameter in parameters_of(module) if parameter.sharded_param.requires_grad)
    for number, parameter in enumerate(trained):
        yield (number, "sharded"), parameter.sharded_param, "grad"
        if not FSDP2_ACCUMULATES_IN_GRAD:
            yield (number, "accumulated"), parameter, "unsharded_accumulated_grad"
        if hasattr(parameter, "_unsharded_param"):  # made by the first forward
            yield (number, "unsharded"), parameter._unsharded_param, "grad"


def take(module: nn.Module) -> Gradient:
    """Move the gradient out of the module, which has none afterwards."""
    taken: Gradient = {}
    for key, owner, attribute in _places(module):
        piece = getattr(owner, attribute)
        if piece is not None:
            taken[key] = piece
            setattr(owner, attribute, None)
    return taken


def put(module: nn.Module, gradient: Gradient) -> None:
    """Set the module's gradient, replacing any."""
    for key, owner, attribute in _places(module):
        setattr(owner, attribute, gradient.get(key))


def drop(module: nn.Module) -> None:
    """Discard the gradient, reduced or not."""
    put(module, {})


@torch.no_grad()
def scale_(gradient: Gradient, factor: float) -> None:
    for piece in gradient.values():
        piece.mul_(factor)


def rescale(module: nn.Module, factor: float) -> None:
    """Multiply the module's gradient, reduced or not."""
    gradient = take(module)
    scale_(gradient, factor)
    put(module, gradient)


@torch.no_grad()
def add_(gradient: Gradient, other: Gradient) -> None:
    """Add `other`, piece by piece; `gradient` may take over its memory."""
    for key, piece in other.items():
        if key in gradient:
            gradient[key].add_(piece)
        else:
            gradient[key] = piece


@contextmanager
def exchanged(module: nn.Module, gradient: Gradient) -> Iterator[None]:
    """Swap the module's gradient for `gradient` inside the context. On exit `gradient` holds the accumulated result and
    the module has its own back."""
    own = take(module)
    put(module, gradient)
    try:
        yield
    finally:
        gradient.clear()
        gradient.update(take(module))
        put(module, own)


@contextmanager
def reduced_at_end(module: nn.Module, last: bool) -> Iterator[None]:
    """Context in which a backward reduces its own and all pending gradients over the ranks, only if `last`."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(last)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def exempt_unused(module: nn.Module) -> None:
    """Let a backward without reduction pass parameters that never ran, such as another expert's; call it between
    forward and backward. FSDP2 looks for their unreduced gradient to cast it to the reduce dtype, and raises
    AttributeError, because the first forward makes the place where that would be. Under reduction it passes them."""
    for group in all_groups(module):
        if not any(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
            group.reduce_grads = True


def reduce_pending(module: nn.Module) -> None:
    """Reduce over the ranks what no backward has reduced yet, by the callback that FSDP2 runs at the end of every
    backward; so the last tile of a batch need not be known in advance. Collective if there is any; call it on all
    ranks."""
    assert isinstance(module, FSDPModule)
    state: Any = module._get_fsdp_state()
    state._state_ctx.manual_backward_finalization_active = False  # PyTorch 2.15 has backward set it
    state._root_post_backward_final_callback()


def unreduced_bytes(module: nn.Module) -> int:
    """Bytes of the whole gradient on each rank while it is unreduced."""
    total = 0
    for parameter in parameters_of(module):
        if parameter.sharded_param.requires_grad:
            policy = parameter.mp_policy
            dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
            total += parameter.sharded_param.numel() * dtype.itemsize  # a DTensor's numel counts the whole
    return total


def _shards(module: nn.Module) -> Iterator[tuple[str, DTensor, Tensor | None, int]]:
    """(name, parameter, this rank's shard of its reduced gradient, number of ranks with the same shard) of all that
    trains."""
    reshard(module)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter, DTensor)
            layout = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
            num_copies = math.prod(size for placement, size in layout if not placement.is_shard())
            yield name, parameter, None if parameter.grad is None else local_shard(parameter.grad), num_copies


@torch.no_grad()
def projection(module: nn.Module) -> float:
    """The fixed ±1 projection (`project`) of the whole reduced gradient, the same on all ranks; it tells directions
    apart, where the norm does not. Collective: one all-reduce of one number."""
    total = torch.zeros((), device=get_device_id())
    for name, parameter, shard, num_copies in _shards(module):
        if shard is not None:
            layout = parameter.device_mesh, parameter.placements
            _, offset = compute_local_shape_and_global_offset(parameter.shape, *layout)
            total = total + project(plain_name(name), shard, offset) / num_copies
    dist.all_reduce(total)
    return total.item()


@torch.no_grad()
def sizes(module: nn.Module) -> list[tuple[float, int]]:
    """(sum of squares of the reduced gradient, elements) of each parameter that has one, the same on all ranks however
    shards are replicated. Collective: one all-reduce, and one read of the device."""
    shares, counts = [], []
    for _, parameter, shard, num_copies in _shards(module):
        share = torch.zeros((), device=parameter.device)
        if shard is not None:
            share = torch.linalg.vector_norm(shard, dtype=torch.float32).square() / num_copies
        shares.append(share)
        counts.append(parameter.numel())
    squares = torch.stack(shares)
    dist.all_reduce(squares)
    return [(square, count) for square, count in zip(squares.tolist(), counts, strict=True) if square > 0]


def eps_numbers(found: Sequence[tuple[float, int]], *, eps: float, clip_factor: float) -> dict[str, float]:
    """`grad_rms`, `grad_rms_to_eps` and `eps_bound_share`: the gradient's entries, clipped by `clip_factor`, against
    Adam's eps.

    Adam divides by sqrt(v) + eps, where sqrt(v) is about the root mean square (RMS) of a gradient entry over steps.
    Where that is large against eps the step does not depend on the gradient's scale; where it is small the parameter
    hardly moves, whatever the learning rate.
    """
    count = max(1, sum(count for _, count in found))
    rms = math.sqrt(sum(square for square, _ in found) / count) * clip_factor
    bound = FREE_OF_EPS * eps / clip_factor
    return {
        "grad_rms": rms,
        "grad_rms_to_eps": rms / eps if eps else math.inf,
        "eps_bound_share": sum(count for square, count in found if square / count < bound**2) / count,
    }


ODD_1, ODD_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47
"""Multipliers of splitmix64 (Steele, Lea, Flood 2014), as signed integers."""


def signs(name: str, numbers: Tensor) -> Tensor:
    """[...] int64 numbers of rows, say, of what has this name -> [...] fp32 signs, 1 or -1, on the same device."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    mixed = numbers * ODD_1 + seed  # int64 wraps around
    mixed = (mixed ^ (mixed >> 30)) * ODD_2
    mixed = mixed ^ (mixed >> 27)
    return 1.0 - 2.0 * (mixed * ODD_1 < 0).float()


@torch.no_grad()
def project(name: str, shard: Tensor, offset: Sequence[int] | None = None) -> Tensor:
    """Share of `shard` in the fixed ±1 projection of the tensor `name`: [] fp32 (fp64 for an fp64 tensor), on its
    device.

        p = sum over tensors and their elements [i, j, ...] of sign(name, 0, i) sign(name, 1, j) ... * element

    - A sign depends only on the tensor's name, an axis and the element's number on it in the whole tensor, in which the
      shard begins at `offset`. So the shards' projections sum to the whole's, however it is sharded; and signs are made
      per row and column, not per element, which costs little more than reading the tensor.
    - The projections of two tensors differ by about the norm of the tensors' difference: the mean square over random
      signs is the squared norm.

    Invariants (tests/engine/test_gradients.py): shards add up to the whole; linear; a permutation changes it.
    """
    total = shard.to(torch.promote_types(shard.dtype, torch.float32))
    for axis in reversed(range(shard.dim())):
        numbers = torch.arange(shard.shape[axis], device=shard.device) + (offset[axis] if offset else 0)
        total = total @ signs(f"{name} {axis}", numbers).to(total.dtype)
    return total
