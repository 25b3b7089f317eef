# SPDX-License-Identifier: Apache-2.0
"""Check at start that a gradient reduced later is the one reduced at once, on this PyTorch and these ranks.

`verl_digen.engine.gradients` reads private state of FSDP2. With another PyTorch `reduce_pending` could do nothing, and
the run would train on a gradient that no rank has reduced. A network of 15 numbers shows it in milliseconds.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from verl_digen.engine import gradients
from verl_digen.engine.shadow import local_shard
from verl_digen.versions import SUPPORTED

POLICIES = (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
"""One for each place where FSDP2 keeps an unreduced gradient."""
NUM_TILES = 2
RTOL = 1e-3
"""Relative tolerance; the ranks' sums are rounded in another order. A gradient that was not reduced is off by more."""


def check_deferred_gradients(mesh: DeviceMesh, rank: int, device: torch.device) -> None:
    """Raise RuntimeError unless deferred gradients equal immediate ones. Collective: call it on all ranks."""
    for policy in POLICIES:
        expected = _gradient(mesh, policy, rank, device, is_deferred=False)
        try:
            found = _gradient(mesh, policy, rank, device, is_deferred=True)
        except AttributeError as error:
            raise RuntimeError(_message(f"no {error.name}")) from error
        for want, have in zip(expected, found, strict=True):
            if have is None or not torch.allclose(have, want, rtol=RTOL):
                found_there = None if have is None else have.tolist()
                raise RuntimeError(_message(f"{found_there} where {want.tolist()} was due"))


@cache
def check_deferred_gradients_once(mesh: DeviceMesh, rank: int, device: torch.device) -> None:
    """`check_deferred_gradients` at the first call of a process; a later engine on these ranks would find the same."""
    check_deferred_gradients(mesh, rank, device)


def _message(found: str) -> str:
    return (
        "a gradient that is reduced after the last tile must equal one that is reduced at every tile, got "
        f"{found}, with torch {version('torch')}, whose FSDP2 keeps gradients elsewhere: "
        f"pip install 'torch{SUPPORTED['torch'].tested}'"
    )


def _gradient(
    mesh: DeviceMesh, policy: MixedPrecisionPolicy, rank: int, device: torch.device, *, is_deferred: bool
) -> list[Any]:
    """This rank's shards of the gradient of `NUM_TILES` tiles; None for a parameter without one."""
    module = _network(device)
    fully_shard(module[0], mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    for tile in range(NUM_TILES):
        rows = torch.arange(6.0, device=device).reshape(2, 3) + rank + tile
        with gradients.reduced_at_end(module, not is_deferred):
            module(rows.to(policy.param_dtype)).float().sum().backward()
    if is_deferred:
        gradients.put(module, gradients.take(module))
        gradients.reduce_pending(module)
    return [None if one.grad is None else local_shard(one.grad) for one in module.parameters()]


def _network(device: torch.device) -> nn.Sequential:
    """Two layers with small whole numbers, which every dtype holds; no random number is drawn."""

    def layer(num_inputs: int, num_outputs: int) -> nn.Module:
        made = nn.utils.skip_init(nn.Linear, num_inputs, num_outputs, bias=num_outputs > 1, device=device)
        for parameter in made.parameters():
            _fill(parameter)
        return made

    return nn.Sequential(layer(3, 3), layer(3, 1))


@torch.no_grad()
def _fill(parameter: Tensor) -> None:
    parameter.copy_(torch.arange(1.0, 1.0 + parameter.numel()).reshape(parameter.shape))
