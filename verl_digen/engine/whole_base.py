# SPDX-License-Identifier: Apache-2.0
"""Choice whether the frozen base under an adapter is kept whole on every rank (`actor_rollout_ref.model.whole_base`).

- A sharded base is gathered in the forward and the backward of every tile. A whole one is gathered once, see
  `whole_groups`, and takes its size in the compute dtype beside its shard.
- auto is decided at the first tile, from the memory that `memory` measures with a sharded base: whole where the tiles
  that fit beside it are the cheaper ones (`schedulers.tiles`), and never where no row fits beside it. On a CPU
  memory does not limit a tile: whole where it takes at most `memory.UNREDUCED_SHARE` of the free memory.
- Tiles of another kind (longer prompts, larger samples) are measured with a sharded base, too. If no row of theirs fits
  beside the whole one, the base is sharded from then on.
- auto leaves it sharded on one shard per replica, where nothing is sent, and with PyTorch 2.11, where the model's
  config refuses true.

Invariant (tests/engine/test_whole_base.py): all ranks decide alike, from the same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from torch import nn
from torch.distributed.tensor import DTensor

from verl_digen.engine import memory, whole_groups
from verl_digen.engine.memory import TileMemory
from verl_digen.hardware.torch_support import FSDP2_HAS_SEVERAL_GROUPS
from verl_digen.schedulers.tiles import TileChoice, prefers_whole_base

logger = logging.getLogger(__name__)


class WholeBase:
    """Switch of one module between a sharded and a whole base, between two tiles.

    Args:
        wanted: "auto", True or False.
    """

    def __init__(self, module: nn.Module, wanted: bool | str):
        self.module = module
        self.num_bytes = whole_groups.frozen_bytes(module)
        """Bytes of the whole base."""
        self.is_kept: bool | None = wanted if isinstance(wanted, bool) else None
        """True if the base is whole from the next tile on; None: not decided yet."""
        self._is_forced = self.is_kept is True
        can_gain = self.num_bytes > 0 and _num_shards(module) > 1
        if self.is_kept is None and not (can_gain and FSDP2_HAS_SEVERAL_GROUPS):
            self.is_kept = False
        if self.is_kept:
            whole_groups.split(module)
            self._tell("model.whole_base=true")

    @property
    def asks(self) -> bool:
        """True if what fits decides, or may overturn what was decided."""
        return self.is_kept is None or (self.is_kept and not self._is_forced)

    def release(self) -> None:
        """Free the gathered memory; the next forward gathers again."""
        if self.is_kept:
            whole_groups.release(self.module)

    def decide_by_free_memory(self) -> None:
        """Decide where no tile is measured. Collective, unless that is decided."""
        if self.is_kept is None:
            free = memory.agreed_free_bytes()
            self._decide(memory.gradients_may_wait(self.num_bytes, free), f"{free / 1e9:.1f} GB are free")

    def measured_without(self, measure: Callable[[], TileMemory]) -> TileMemory:
        """Result of `measure`, during which the base is sharded."""
        if not self.is_kept:
            return measure()
        whole_groups.merge(self.module)
        try:
            return measure()
        finally:
            whole_groups.split(self.module)

    def choose(self, found: TileMemory, choose: Callable[..., TileChoice], num_rows: int) -> TileChoice:
        """Tiles of measured rows; decides, or gives the whole base up if none of these rows fits beside it.

        Args:
            choose: `choose_tile` with everything but memory and costs.
            num_rows: most rows of any rank.
        """
        sharded = partial(choose, found.rows, num_blocks=found.num_blocks)
        if self.is_kept is False:
            return sharded()
        beside = found.beside(self.num_bytes)
        if self._is_forced:
            return choose(beside.rows, num_blocks=beside.num_blocks, is_whole=True)
        whole = choose(beside.rows, num_blocks=beside.num_blocks, is_whole=True)
        fits = beside.rows(whole.num_recomputed) >= min(whole.shape.size, num_rows)
        room = f"{max(0, found.room - found.base - found.row) / 1e9:.1f} GB are free beside a tile of one row"
        if self.is_kept is None:
            gains = prefers_whole_base(sharded(), whole, num_blocks=found.num_blocks, num_rows=num_rows)
            self._decide(fits and gains, room)
        elif not fits:
            whole_groups.merge(self.module)
            self._decide(False, room)
        return whole if self.is_kept else sharded()

    def _decide(self, is_kept: bool, why: str) -> None:
        if is_kept:
            whole_groups.split(self.module)
        self.is_kept = is_kept
        self._tell(why)

    def _tell(self, why: str) -> None:
        logger.info(
            "the frozen base (%.1f GB) is kept %s: %s",
            self.num_bytes / 1e9,
            "whole on every rank, and gathered once" if self.is_kept else "sharded, and gathered at every tile",
            why,
        )


def _num_shards(module: nn.Module) -> int:
    """Ranks that a frozen parameter is sharded over."""
    return max(
        (
            parameter.device_mesh.size(axis)
            for parameter in module.parameters()
            if isinstance(parameter, DTensor) and not parameter.requires_grad
            for axis, placement in enumerate(parameter.placements)
            if placement.is_shard()
        ),
        default=1,
    )
