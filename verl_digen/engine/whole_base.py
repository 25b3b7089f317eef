# SPDX-License-Identifier: Apache-2.0
"""Choice whether the base under an adapter is gathered once for many tiles (`actor_rollout_ref.model.whole_base`).

- A sharded base is gathered in the forward and the backward of every tile. A whole one is gathered, with the adapter,
  in the first forward of a fragment and kept to the backward of its last tile; it takes its size in the compute dtype
  beside its shard.
- auto is decided at the first tile, from the memory that `memory` measures with a sharded base: whole where the tiles
  that fit beside it are the cheaper ones (`schedulers.tiles`). On a CPU memory does not limit a tile: whole where it
  takes at most `memory.UNREDUCED_SHARE` of the free memory.
- Tiles of another kind (longer prompts, larger samples) are measured with a sharded base, too. If no row of theirs fits
  beside the whole one, the base is sharded from then on.
- On one shard it is whole anyway. FSDP2 copies it in every forward and backward even so; unless the key is false,
  forwards read the shard itself, if it is on the device in the compute dtype.

Invariants (tests/engine/test_whole_base.py): all ranks decide alike, from the same numbers; the gradient bitwise equals
the sharded base's; a fragment gathers every weight once; between fragments a rank holds shards alone.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from verl_digen.engine import memory
from verl_digen.engine.fsdp2 import compute_dtype, gathered_bytes, keep_gathered, parameters_of
from verl_digen.engine.memory import TileMemory
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


class WholeBase:
    """Switch of one module between a sharded and a whole base, between two tiles; `wanted` is "auto", True or False."""

    def __init__(self, module: nn.Module, wanted: bool | str):
        self.module, parameters = module, parameters_of(module)
        frozen = [one for one in parameters if not one.sharded_param.requires_grad]
        is_on_one_shard = all(one.mesh_info.shard_mesh_size == 1 for one in frozen)
        is_ready = all(one.sharded_param.dtype == compute_dtype(one) and not one.offload_to_cpu for one in frozen)
        self.num_bytes = gathered_bytes(parameters)
        """Bytes that the whole base and its adapter take beside their shards."""
        self.in_place_bytes = 0
        """Bytes of a base that forwards read in place."""
        self.is_kept: bool | None = wanted if isinstance(wanted, bool) else None
        """True if the base is whole from the next tile on; None: not decided yet."""
        self._shard_again: Callable[[], None] = lambda: None
        if frozen and self.is_kept is not False and is_on_one_shard and is_ready:
            self.in_place_bytes, self.num_bytes, self.is_kept = gathered_bytes(frozen), 0, False
            for one in frozen:
                one.__class__ = InPlaceParam
        elif not frozen or (is_on_one_shard and not self.is_kept):
            self.is_kept = False
        elif self.is_kept:
            self._keep()
            self._tell("model.whole_base=true")
        self._is_forced = self.is_kept is True

    @property
    def asks(self) -> bool:
        """True if what fits decides, or may overturn what was decided."""
        return self.is_kept is None or (self.is_kept and not self._is_forced)

    def decide_by_free_memory(self) -> None:
        """Decide where no tile is measured. Collective, unless that is decided."""
        if self.is_kept is None:
            free = memory.agreed_free_bytes()
            self._decide(memory.gradients_may_wait(self.num_bytes, free), f"{free / 1e9:.1f} GB are free")

    def measured_without(self, measure: Callable[[], TileMemory]) -> TileMemory:
        """Result of `measure`, during which the base is sharded."""
        if not self.is_kept:
            return measure()
        self._shard_again()
        try:
            return measure()
        finally:
            self._keep()

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
            self._shard_again()
            self._decide(False, room)
        return whole if self.is_kept else sharded()

    def _decide(self, is_kept: bool, why: str) -> None:
        if is_kept:
            self._keep()
        self.is_kept = is_kept
        self._tell(why)

    def _keep(self) -> None:
        self._shard_again = keep_gathered(self.module)

    def _tell(self, why: str) -> None:
        logger.info(
            "the frozen base (%.1f GB) is kept %s: %s",
            self.num_bytes / 1e9,
            "whole on every rank while a fragment trains" if self.is_kept else "sharded, and gathered at every tile",
            why,
        )
