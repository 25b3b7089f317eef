# SPDX-License-Identifier: Apache-2.0
"""Joint columns: numbers of rows on all ranks and in all tiles -> a column of each tile, before the tiles train.

Invariant (tests/engine/test_joint.py): the column does not depend on how rows are spread over tiles and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verl_digen.engine.tile_work import TileWork

Exchange = Callable[[Tensor], Tensor]
"""Sum of a tensor over the data-parallel ranks."""


def joint_columns(
    work: TileWork, scalars: Sequence[Tensor], combine: Callable[..., Tensor], exchange: Exchange
) -> list[Tensor]:
    """The joint column of each of this rank's tiles, [N] fp32 each.

    Args:
        scalars: per tile one number for each row, [N] fp32.
        combine: `JointRows` -> column of all rows.
    """
    index = {(row.sample, row.point): number for number, row in enumerate(work.all_rows.rows)}
    places = [torch.tensor([index[row.sample, row.point] for row in tile.rows]) for tile in work.tiles]
    found = torch.zeros(work.num_rows, device=scalars[0].device)
    for tile, place, values in zip(work.tiles, places, scalars, strict=True):
        if not tile.is_filler:  # its row is in another tile, too
            found[place.to(found.device)] = values
    column = combine(work.all_rows.joint(exchange(found)))
    return [column[place.to(column.device)] for place in places]
