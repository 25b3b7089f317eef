# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters that stay gathered: FSDP2 gathers them once, and shards the trained ones beside them alone.

FSDP2 communicates the parameters of a unit as one group, and gathers it in every forward and backward. `split` moves
the frozen parameters of each unit to a group of their own, whose gathered memory stays; `merge` moves them back.

- Shards stay: weights, checkpoints, export, and copies are read and written there, as before. So a whole base
  takes its size in the compute dtype beside its shard.
- `release` frees the gathered memory: before the device is handed over, and where shards of frozen parameters change.
  The next forward gathers once more, the same values.
- Units have several groups from PyTorch 2.12 on (`FSDP2_HAS_SEVERAL_GROUPS`); with 2.11 `split` must not be called.

Invariants (tests/engine/test_whole_base.py): the gradient bitwise equals the sharded base's; a tile gathers the
trained parameters alone; after `merge` a unit has one group again, with all of its parameters.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from verl_digen.engine.fsdp2 import groups_of, parameters_of, reshard, set_groups, units_of


class WholeGroup(FSDPParamGroup):
    """Parameters of one unit that are gathered at most once between two calls of `release`."""

    is_whole = False
    """True while the gathered memory holds the values of the shards."""

    def unshard(self, async_op: bool = False) -> None:
        """FSDP2's `unshard`; nothing is gathered that is there."""
        if not self.is_whole:
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        """FSDP2's `wait_for_unshard`."""
        if self.is_whole:
            self._to_unsharded()
            return
        super().wait_for_unshard()
        self.is_whole = self.is_unsharded

    def _to_sharded(self) -> None:
        """Put the shards in place of the gathered parameters, whose memory stays."""
        if not self.is_whole:
            super()._to_sharded()
        elif not self.is_sharded:
            for parameter in self.fsdp_params:
                parameter._setattr_on_modules(parameter.sharded_param)
                parameter.sharded_state = ShardedState.SHARDED
            self._sharded_state = ShardedState.SHARDED

    def release(self) -> None:
        """Free the gathered memory."""
        self._to_sharded()
        for parameter in self.fsdp_params:
            parameter.free_unsharded_param()
        self.is_whole = False


def split(module: nn.Module) -> None:
    """Keep the frozen parameters of every unit gathered from the next forward on. Between two tiles only."""
    reshard(module)
    for unit in _units(module):
        if _is_split(unit):
            continue
        (group,) = groups_of(unit)
        frozen = [parameter for parameter in group.fsdp_params if not parameter.sharded_param.requires_grad]
        if not frozen:
            continue
        whole = WholeGroup(
            [],
            group.modules,
            group.mesh_info,
            group.post_forward_mesh_info,
            group.device,
            None,
            group.mp_policy,
            group.offload_policy,
        )
        whole.fsdp_params = frozen
        group.fsdp_params = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
        set_groups(unit, [group, whole] if group.fsdp_params else [whole])


def merge(module: nn.Module) -> None:
    """Shard all parameters again, and free the gathered memory. Between two tiles only."""
    reshard(module)
    for unit in _units(module):
        if not _is_split(unit):
            continue
        *others, whole = groups_of(unit)
        whole.release()
        group = (
            others[0]
            if others
            else FSDPParamGroup(
                [],
                whole.modules,
                whole.mesh_info,
                whole.post_forward_mesh_info,
                whole.device,
                None,
                whole.mp_policy,
                whole.offload_policy,
            )
        )
        group.fsdp_params = [*group.fsdp_params, *whole.fsdp_params]
        set_groups(unit, [group])


def release(module: nn.Module) -> None:
    """Free the gathered memory of frozen parameters; the next forward gathers them again."""
    for unit in _units(module):
        if _is_split(unit):
            groups_of(unit)[-1].release()


def frozen_bytes(module: nn.Module) -> int:
    """Bytes of all frozen parameters, gathered."""
    total = 0
    for parameter in parameters_of(module):
        if not parameter.sharded_param.requires_grad:
            dtype = parameter.mp_policy.param_dtype or parameter.sharded_param.dtype
            total += parameter.sharded_param.numel() * dtype.itemsize  # a DTensor's numel counts the whole
    return total


def _units(module: nn.Module) -> list[Any]:
    """FSDP2's state of every unit that has parameters."""
    return [unit for unit in units_of(module) if groups_of(unit)]


def _is_split(unit: Any) -> bool:
    return isinstance(groups_of(unit)[-1], WholeGroup)
