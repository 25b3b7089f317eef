# SPDX-License-Identifier: Apache-2.0
"""Bytes of the weights that a training device gathers.

With `actor_rollout_ref.model.whole_base` a frozen base stays on every device, in the compute dtype, beside its shard;
tiles gather the adapter alone. auto follows the engine's rule (`verl_digen.engine.whole_base`), from planned bytes.
"""

from __future__ import annotations

from verl_digen.hardware.torch_support import FSDP2_HAS_SEVERAL_GROUPS
from verl_digen.tools.plan.host import Items
from verl_digen.tools.plan.run import Run

WHOLE_BASE = "frozen base, whole"
GATHERED = "gathered parameters"


def may_be_whole(run: Run) -> bool:
    """True if the base may be kept whole: `whole_base` is not false, and there is a base that is sharded."""
    settings = run.settings
    if not settings.is_lora or settings.whole_base is False:
        return False
    return settings.whole_base is True or (settings.num_shards > 1 and FSDP2_HAS_SEVERAL_GROUPS)


def whole_base_bytes(run: Run) -> int:
    """Bytes of the frozen base on one device, if it is whole."""
    counts = run.measured.counts
    return (counts.num_params - counts.num_trained) * run.settings.dtypes.compute.itemsize


def gathered(run: Run, block: int, *, is_whole: bool) -> Items:
    """Unsharded parameters while a block runs backward: its own, the previous one's, which are prefetched, and
    those outside all blocks. Before the first block come those that are sharded as blocks and never recomputed. Beside
    a whole base they are trained ones alone."""
    counts, itemsize = run.measured.counts, run.settings.dtypes.compute.itemsize
    traced = run.measured.training.blocks
    if is_whole:
        base = {WHOLE_BASE: whole_base_bytes(run)}
        if not run.settings.reshard:
            return base | {GATHERED: counts.num_trained * itemsize}
        trained = [0, *(one.num_trained for one in traced), 0]
        outside = counts.num_trained // run.measured.num_experts - sum(trained)
        return base | {GATHERED: (trained[block] + trained[block + 1] + max(0, outside)) * itemsize}
    if not run.settings.reshard:
        return {GATHERED: counts.num_params * itemsize}
    blocks = [one.num_params for one in traced]
    before = counts.num_params // run.measured.num_experts - sum(blocks) - counts.outside_blocks
    blocks = [max(0, before), *blocks, 0]
    return {GATHERED: (blocks[block] + blocks[block + 1] + counts.outside_blocks) * itemsize}
