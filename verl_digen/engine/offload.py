# SPDX-License-Identifier: Apache-2.0
"""Offloaded weights that a host may read.

verl offloads with `module.to("cpu", non_blocking=True)`: the copies arrive with the accelerator's next synchronisation,
and until then the host's memory holds garbage. verl loads such weights back in the same stream, which is safe; a
reader on the host has to wait.

FSDP2 is such a reader, inside the very call: it pads a shard that is shorter than the others' into new host memory. So
a module with such shards is offloaded by blocking copies.

Invariant (tests/engine/test_offload.py): host copies of offloaded weights, and weights that return to the device, are
bitwise the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name


def wait_for(tensors: Iterable[Tensor]) -> None:
    """Wait until tensors that were offloaded to the host have arrived."""
    if get_device_name() != "cpu" and any(tensor.device.type == "cpu" for tensor in tensors):
        get_platform().synchronize()


def offload_safely(module: nn.Module) -> None:
    """Make offloading `module` block, if a rank's shard of a parameter may be shorter than another's."""
    if any(_is_uneven(parameter) for parameter in module.parameters()):
        module.to = partial(_blocking_to, module)  # type: ignore[method-assign]


def _blocking_to(module: nn.Module, device: Any, *, non_blocking: bool = False) -> nn.Module:
    """`module.to`; verl gives it a device, and asks for copies that are not waited for."""
    return nn.Module.to(module, device)


def _is_uneven(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    return any(
        isinstance(placement, Shard) and parameter.shape[placement.dim] % parameter.device_mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
    )
