# SPDX-License-Identifier: Apache-2.0
"""Gathered parameters of an FSDP2 module: kept from forward to forward, and dropped, also after an exception.

- Without `forwards(keeps=True)` each unit gathers its parameters in every forward, T times in a denoising loop.
- Without `kept_after_backward` each unit gathers its parameters again for every tile.

With `reshard_after_forward=false`, FSDP2's own `reshard` does nothing while a forward runs. After an exception FSDP2
assumes that the forward still runs, so a reader of the shards would get gathered parameters. Call `recover` first then.

Invariants (tests/engine/test_shadow.py, test_gradients.py, test_assistant.py): afterwards a module's parameters are its
shards; with `keeps` each unit gathers once, and the outputs are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from verl_digen.engine.fsdp2 import groups_of, reset, units_of


def gathered_bytes(module: nn.Module) -> int:
    """Bytes that all parameters of the module's FSDP2 units take on a rank while they are gathered."""
    return sum(
        parameter._orig_size.numel() * (group.mp_policy.param_dtype or parameter.sharded_param.dtype).itemsize
        for group in _groups(module)
        for parameter in group.fsdp_params
    )


@contextmanager
def forwards(module: nn.Module, *, keeps: bool) -> Iterator[None]:
    """Context for forwards without gradient; after it, also after an exception, the parameters are the shards.

    Args:
        keeps: a unit gathers its parameters in its first forward, and keeps them for those that follow. The same on
            all ranks.
    """
    meshes = [(group, group.post_forward_mesh_info) for group in _groups(module)]
    for group, _ in meshes if keeps else ():
        group.post_forward_mesh_info = None  # what FSDP2's `set_reshard_after_forward(False)` sets
    try:
        yield
    except BaseException:
        recover(module)
        raise
    finally:
        for group, mesh in meshes:
            group.post_forward_mesh_info = mesh
        reshard(module)


@contextmanager
def kept_after_backward(module: nn.Module, keeps: bool) -> Iterator[None]:
    """Context in which units that keep their parameters after a forward (`reshard_after_forward=false`) keep them after
    its backward too, if `keeps`: the next forward, with the same weights, does not gather. The same on all ranks."""
    groups = [group for group in _groups(module) if group.post_forward_mesh_info is None] if keeps else []
    for group in groups:
        group.reshard_after_backward = False
    try:
        yield
    finally:
        for group in groups:
            group.reshard_after_backward = True


def _groups(module: nn.Module) -> list[Any]:
    """FSDP2's parameter groups, which gather as one."""
    return [group for unit in units_of(module) for group in groups_of(unit)]


def reshard(module: nn.Module) -> None:
    """Make every FSDP2 unit of `module` drop its gathered parameters. After an exception call `recover` first."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def recover(module: nn.Module) -> None:
    """Reset the module after an exception in a forward or backward; the gradient stays."""
    # a module becomes a root in its first forward, before which there is nothing to recover from
    if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root:
        reset(module)
