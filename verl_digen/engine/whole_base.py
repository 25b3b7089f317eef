# SPDX-License-Identifier: Apache-2.0
"""Choice whether the frozen base under an adapter is kept whole on every rank (`actor_rollout_ref.model.whole_base`).

- A sharded base is gathered in the forward and the backward of every tile. A whole one is gathered once, and takes its
  size in the compute dtype beside its shard.
- auto is decided at the first tile, from the memory that `memory` measures with a sharded base: whole where the tiles
  that fit beside it are the cheaper ones (`schedulers.tiles`). On a CPU memory does not limit a tile: whole where it
  takes at most `memory.UNREDUCED_SHARE` of the free memory.
- Tiles of another kind (longer prompts, larger samples) are measured with a sharded base, too. If no row of theirs fits
  beside the whole one, the base is sharded from then on.
- On one shard it is whole anyway. FSDP2 copies it in every forward and backward even so; unless the key is false,
  forwards read the shard itself, if it is on the device in the compute dtype.
- On several shards auto leaves it sharded with PyTorch 2.11, whose units have one group each; there the model's config
  refuses true.

FSDP2 communicates the parameters of a unit as one group, and gathers it in every forward and backward. `split_frozen`
moves the frozen parameters of each unit to a group of their own, whose gathered memory stays until `release_frozen`:
before the device is handed over, and where shards of frozen parameters change. Weights, checkpoints, export, and copies
are read and written in the shards, which stay.

Invariants (tests/engine/test_whole_base.py): all ranks decide alike, from the same numbers; the gradient bitwise equals
the sharded base's; a tile gathers the trained parameters alone; after `merge_frozen` a unit has one group again, with
all of its parameters.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from verl_digen.engine import memory
from verl_digen.engine.fsdp2 import (
    compute_dtype,
    gathered_bytes,
    groups_of,
    parameters_of,
    reshard,
    set_groups,
    units_of,
)
from verl_digen.engine.memory import TileMemory
from verl_digen.hardware.torch_support import FSDP2_HAS_SEVERAL_GROUPS
from verl_digen.schedulers.tiles import TileChoice, prefers_whole_base

logger = logging.getLogger(__name__)


class InPlaceParam(FSDPParam):
    """Parameter of one shard, which forwards read in place."""

    def init_all_gather_outputs(self, *args: Any, **kwargs: Any) -> None:
        """Give forwards the shard's memory. FSDP2 then copies the shard to it; PyTorch copies no tensor to itself."""
        shard = self._sharded_param_data
        assert shard.nbytes == shard.untyped_storage().nbytes(), "FSDP2 would resize it"
        self.all_gather_outputs = [shard]

    def free_unsharded_param(self) -> None:
        """Keep the shard's memory."""

    def reset_sharded_param(self) -> None:
        """FSDP2's `reset_sharded_param`, after which forwards read the new shard."""
        super().reset_sharded_param()
        self.all_gather_outputs = []
        self.__dict__.pop("_unsharded_param", None)


class WholeGroup(FSDPParamGroup):
    """Parameters of one unit that are gathered at most once between two calls of `release_frozen`."""

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


def split_frozen(module: nn.Module) -> None:
    """Keep the frozen parameters of every unit gathered from the next forward on. Between two tiles only."""
    reshard(module)
    for unit in _units(module):
        if _is_split(unit):
            continue
        (group,) = groups_of(unit)
        frozen = [parameter for parameter in group.fsdp_params if not parameter.sharded_param.requires_grad]
        if not frozen:
            continue
        whole = _empty_group(WholeGroup, group)
        whole.fsdp_params = frozen
        group.fsdp_params = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
        set_groups(unit, [group, whole] if group.fsdp_params else [whole])


def _empty_group(kind: type[FSDPParamGroup], like: Any) -> Any:
    """A group without parameters, for the modules and the ranks of another one."""
    meshes = like.mesh_info, like.post_forward_mesh_info
    return kind([], like.modules, *meshes, like.device, None, like.fsdp_params[0].mp_policy, like.offload_policy)


def merge_frozen(module: nn.Module) -> None:
    """Shard all parameters again, and free the gathered memory. Between two tiles only."""
    reshard(module)
    for unit in _units(module):
        if not _is_split(unit):
            continue
        *others, whole = groups_of(unit)
        whole.release()
        group = others[0] if others else _empty_group(FSDPParamGroup, whole)
        group.fsdp_params = [*group.fsdp_params, *whole.fsdp_params]
        set_groups(unit, [group])


def release_frozen(module: nn.Module) -> None:
    """Free the gathered memory of frozen parameters; the next forward gathers them again."""
    for unit in _units(module):
        if _is_split(unit):
            groups_of(unit)[-1].release()


def _units(module: nn.Module) -> list[Any]:
    """FSDP2's state of every unit that has parameters."""
    return [unit for unit in units_of(module) if groups_of(unit)]


def _is_split(unit: Any) -> bool:
    return isinstance(groups_of(unit)[-1], WholeGroup)


class WholeBase:
    """Switch of one module between a sharded and a whole base, between two tiles; `wanted` is "auto", True or False."""

    def __init__(self, module: nn.Module, wanted: bool | str):
        self.module = module
        self.num_bytes = gathered_bytes(module, frozen_only=True)
        """Bytes that the whole base takes beside its shard."""
        self.in_place_bytes = 0
        """Bytes of a base that forwards read in place."""
        frozen = [one for one in parameters_of(module) if not one.sharded_param.requires_grad]
        is_on_one_shard = all(one.mesh_info.shard_mesh_size == 1 for one in frozen)
        is_ready = all(one.sharded_param.dtype == compute_dtype(one) and not one.offload_to_cpu for one in frozen)
        self.is_kept: bool | None = wanted if isinstance(wanted, bool) else None
        """True if the base is whole from the next tile on; None: not decided yet."""
        if frozen and self.is_kept is not False and is_on_one_shard and is_ready:
            self.in_place_bytes, self.num_bytes, self.is_kept = self.num_bytes, 0, False
            for one in frozen:
                one.__class__ = InPlaceParam
        elif not (frozen and FSDP2_HAS_SEVERAL_GROUPS) or (is_on_one_shard and not self.is_kept):
            self.is_kept = False
        elif self.is_kept:
            split_frozen(module)
            self._tell("model.whole_base=true")
        self._is_forced = self.is_kept is True

    @property
    def asks(self) -> bool:
        """True if what fits decides, or may overturn what was decided."""
        return self.is_kept is None or (self.is_kept and not self._is_forced)

    def release(self) -> None:
        """Free the gathered memory; the next forward gathers again."""
        if self.is_kept:
            release_frozen(self.module)

    def decide_by_free_memory(self) -> None:
        """Decide where no tile is measured. Collective, unless that is decided."""
        if self.is_kept is None:
            free = memory.agreed_free_bytes()
            self._decide(memory.gradients_may_wait(self.num_bytes, free), f"{free / 1e9:.1f} GB are free")

    def measured_without(self, measure: Callable[[], TileMemory]) -> TileMemory:
        """Result of `measure`, during which the base is sharded."""
        if not self.is_kept:
            return measure()
        merge_frozen(self.module)
        try:
            return measure()
        finally:
            split_frozen(self.module)

    def choose(self, found: TileMemory, choose: Callable[..., TileChoice], num_rows: int) -> TileChoice:
        """Tiles of measured rows; decides, or gives the whole base up if none of these rows fits beside it. `choose` is
        `choose_tile` with everything but memory and costs, `num_rows` the most rows of any rank."""
        sharded = partial(choose, found.rows, num_blocks=found.num_blocks, is_whole=self.in_place_bytes > 0)
        if self.is_kept is False:
            return sharded()
        beside = replace(found, room=found.room - self.num_bytes)
        whole = choose(beside.rows, num_blocks=beside.num_blocks, is_whole=True)
        if self._is_forced:
            return whole
        fits = beside.rows(whole.num_recomputed) >= min(whole.shape.size, num_rows)
        room = f"{max(0, found.room - found.base - found.row) / 1e9:.1f} GB are free beside a tile of one row"
        if self.is_kept is None:
            gains = prefers_whole_base(sharded(), whole, num_blocks=found.num_blocks, num_rows=num_rows)
            self._decide(fits and gains, room)
        elif not fits:
            merge_frozen(self.module)
            self._decide(False, room)
        return whole if self.is_kept else sharded()

    def _decide(self, is_kept: bool, why: str) -> None:
        if is_kept:
            split_frozen(self.module)
        self.is_kept = is_kept
        self._tell(why)

    def _tell(self, why: str) -> None:
        logger.info(
            "the frozen base (%.1f GB) is kept %s: %s",
            self.num_bytes / 1e9,
            "whole on every rank, and gathered once" if self.is_kept else "sharded, and gathered at every tile",
            why,
        )
