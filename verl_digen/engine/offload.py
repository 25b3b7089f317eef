# SPDX-License-Identifier: Apache-2.0
"""Offloaded weights that a host may read.

verl offloads with `module.to("cpu", non_blocking=True)`: the copies arrive with the accelerator's next synchronisation,
and until then the host's memory holds garbage. verl loads such weights back in the same stream, which is safe; a reader
on the host has to wait. FSDP2 is such a reader, inside the very call: it pads a shard that is shorter than the others'
into new host memory. So a module with such shards is offloaded by blocking copies.

A frozen base that one rank holds whole is copied to the host once, its layers in int8, too. Each offload puts that copy
in place of the base, and copies the adapter alone. A sleeping replica of this node shares the copy of the parameters if
it has equal weights (`verl_digen.weights.host_copies`). So nothing may write to a frozen weight on the host, and a
change of one on the device is lost at the next offload.

Invariants (tests/engine/test_offload.py): host copies of offloaded weights, and weights that return to the device, are
bitwise the weights; replica and rank hold one copy of equal frozen weights, whichever comes first.
"""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name

from verl_digen.models.kernels import Int8Linear
from verl_digen.platforms.module_memory import host_copies, name_on_node, parameters_of
from verl_digen.weights.host_copies import HostPool

logger = logging.getLogger(__name__)


def wait_for(tensors: Iterable[Tensor]) -> None:
    """Wait until tensors that were offloaded to the host have arrived."""
    if get_device_name() != "cpu" and any(tensor.device.type == "cpu" for tensor in tensors):
        get_platform().synchronize()


def offload_safely(module: nn.Module, *, keeps_base: bool) -> None:
    """Make offloading `module` block, if a rank's shard of a parameter may be shorter than another's. With
    `keeps_base`, nobody changes frozen parameters, and their host copy is kept if this rank holds them whole."""
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    if any(_is_uneven(parameter) for parameter in module.parameters()):
        module.to = partial(_blocking_to, module)  # type: ignore[method-assign]
    elif keeps_base and frozen and all(_local(parameter).shape == parameter.shape for parameter in frozen):
        module.to = KeptBase(module, frozen).to  # type: ignore[method-assign]


class KeptBase:
    """Host copy of the frozen parameters of `module` and of its weights in int8, made at the first offload."""

    def __init__(self, module: nn.Module, frozen: list[nn.Parameter]):
        self._module, self._frozen = module, frozen
        self._copies: list[Tensor] = []
        """Copies on the host, in the order of `_base`."""

    def to(self, device: Any, *, non_blocking: bool = False) -> nn.Module:
        """`module.to`; verl gives it a device, and "cpu" for the host."""
        if str(device) != "cpu" or get_device_name() == "cpu":
            return nn.Module.to(self._module, device, non_blocking=non_blocking)
        if not self._copies:
            self._copy()
        copies = dict(zip(self._base(), self._copies, strict=True))
        return self._module._apply(partial(self._on_host, copies, non_blocking=non_blocking))

    def _base(self) -> list[Tensor]:
        """The frozen parameters, then int8 weights and scales, which are other tensors after every move."""
        layers = (module for module in self._module.modules() if isinstance(module, Int8Linear))
        return [*self._frozen, *(tensor for layer in layers for tensor in (layer.weight, layer.scale))]

    def _copy(self) -> None:
        shards = [_local(tensor) for tensor in self._base()]
        device, in_bytes = shards[0].device, [shard.reshape(-1).view(torch.uint8) for shard in shards]
        pool, count = HostPool(device), len(self._frozen)
        copies = host_copies(parameters_of(name_on_node(), 0), in_bytes[:count], device, pool)
        parts = (*copies.parts, *host_copies(None, in_bytes[count:], device, pool).parts)
        self._copies = [part.view(shard.dtype).view(shard.shape) for shard, part in zip(shards, parts, strict=True)]
        size, origin = sum(map(len, in_bytes)), "made by this rank" if copies.is_new else "which another process made"
        logger.info(
            "the frozen base has a host copy of %.1f GB, %s; offloading copies only the adapter", size / 1e9, origin
        )

    def _on_host(self, copies: dict[Tensor, Tensor], tensor: Tensor, *, non_blocking: bool) -> Tensor:
        """A tensor of the module on the host; of the base with the memory of its copy."""
        if tensor not in copies:
            return tensor.to("cpu", non_blocking=non_blocking)
        if not isinstance(tensor, DTensor):
            return copies[tensor]
        host = torch.empty_like(tensor, device="cpu")  # memory that is never written to, and so takes none
        _local(host).set_(copies[tensor])  # pyright: ignore[reportArgumentType]
        return host


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, detached; what is done to it is done to the tensor."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _blocking_to(module: nn.Module, device: Any, *, non_blocking: bool = False) -> nn.Module:
    """`module.to`; verl gives it a device, and asks for copies that are not waited for."""
    return nn.Module.to(module, device)


def _is_uneven(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(
        isinstance(placement, Shard) and parameter.shape[placement.dim] % parameter.device_mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
    )
