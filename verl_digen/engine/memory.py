# SPDX-License-Identifier: Apache-2.0
"""Memory of tiles as measured, and whether gradients may stay unreduced.

- Rows: the peak of a forward/backward is the largest of several moments, each linear in its rows, so it grows faster
  with more rows: with few, it may be at a moment with many gradients and few activations. So 1, 2, 4, ... rows are
  rehearsed, and the last two peaks give the rows that fit, less a margin for what varies from call to call, and less
  the optimizer's state, which the first step makes and which then stays on the device beside every tile.
- Blocks: rows are measured with all blocks recomputed. What each block saves is seen while it is recomputed; one more
  rehearsal, with one row and as few blocks recomputed as that shows to fit, scales these numbers to what they are
  outside of recomputation.
- Twice as many rows are rehearsed only where the peak shows, on every rank, that they fit: at most, all that was taken
  beyond what was allocated before comes again.
- A rehearsal that runs out of memory on the only rank leaves half of its rows, or with kept blocks fewer of them. On
  one of several ranks it ends the run: the other ranks wait in a collective of FSDP2.
- A tile that trains and runs out of memory ends the run, with the settings of a tile of half the rows. Rolling it back
  would take a second copy of the gradient beside every tile, of all weights where gradients wait.
- On a CPU memory does not limit a tile, and a process's peak memory cannot be reset: tiles have a fixed number of rows,
  enough to keep caches and cores busy.

Invariants (tests/engine/test_memory.py, test_tight_device.py): the rows that fit do by the measurements, one more would
not. No rehearsal beyond what its measurements allow. All ranks have the same numbers: the most of any.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from verl.utils.device import get_device_id

from verl_digen.engine.copies import local_shard
from verl_digen.engine.recompute import ALL, Recomputation
from verl_digen.platforms import device_memory
from verl_digen.platforms.device_memory import MARGIN
from verl_digen.schedulers.tiles import Row

logger = logging.getLogger(__name__)

CPU_ROWS = 8
"""Rows of an automatic tile on a CPU."""
UNREDUCED_SHARE = 0.4
"""Share of free memory that unreduced gradients may take; the rest is for activations and the reduction itself."""
GATHERED_SHARE = 0.6
"""Share of free memory that gathered weights may take during an assist; the rest is for activations and decoding."""
NUM_MOMENTS = 2
"""Tensors that Adam keeps per trained parameter, in the parameter's dtype."""
SMALLER_SAMPLES = (
    "use more devices, let devices share a row (actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2), "
    "train an adapter (actor_rollout_ref.model.lora_rank), or smaller samples (digen.sampling)"
)
"""Remedy where one row does not fit with any setting of the trainer."""


@dataclass(frozen=True)
class TileMemory:
    """Device memory of tiles of one kind, in bytes; the same on all ranks."""

    room: int
    """Limit of a tile's peak."""
    base: int
    """Peak without rows."""
    row: int
    """Each row, with all blocks recomputed."""
    kept: tuple[int, ...] = ()
    """Each row, for each block more that is not recomputed: the last block's number first. Empty: nothing to choose."""

    @property
    def num_blocks(self) -> int:
        """Blocks that may be recomputed or not."""
        return len(self.kept)

    def rows(self, num_recomputed: int) -> int:
        """Rows that fit into a tile; 0 if none does."""
        row = self.row + sum(self.kept[: self.num_blocks - num_recomputed])
        return max(0, (self.room - self.base) // max(row, 1))


def measure_tiles(
    peak_bytes: Callable[[int], int],
    limit_bytes: int,
    *,
    num_rows: int,
    kept_bytes: Callable[[], int],
    later_bytes: int = 0,
    blocks: Recomputation | None = None,
    most: Callable[[Sequence[int]], list[int]] = list,
) -> TileMemory:
    """Measure tiles by dry runs of few rows. Collective.

    Args:
        peak_bytes: rows -> the peak of their forward/backward; called with 1 twice, the first time to allocate what
            stays (workspaces), with 2, 4, ... where every rank can hold them, and with 1 where not all blocks are
            recomputed.
        limit_bytes: memory this process can use in all.
        num_rows: rows that there are: once as many were rehearsed, no more are. The same on all ranks.
        kept_bytes: memory that is allocated between two tiles.
        later_bytes: memory for what comes later and stays.
        blocks: decides which blocks are recomputed; None: that is not to be chosen.
        most: maximum of all ranks' values, one by one. Collective.

    Example: 8 GB kept and 2 GB per call and per row, 80 GB
        measure_tiles(lambda rows: (10 + 2 * rows) * GB, 80 * GB, num_rows=64, kept_bytes=lambda: 8 * GB).rows(0)
        # 31 = (80 * 0.9 - 10) / 2
    """
    if blocks is not None:
        blocks.num_blocks = ALL
    peak_bytes(1)
    kept = kept_bytes()
    with nullcontext({}) if blocks is None else blocks.measured() as saved_bytes:
        one = peak_bytes(1)
    sizes = [max(0, saved_bytes[block]) for block in sorted(saved_bytes, reverse=True)]
    room = int(limit_bytes * (1 - MARGIN)) - later_bytes
    if one > room and later_bytes > 0:
        logger.warning(
            "one row peaks at %.1f GB of %.1f GB, and the optimizer's state, which comes with the first step, takes "
            "%.1f GB more; if a step runs out of memory, %s",
            one / 1e9,
            limit_bytes / 1e9,
            later_bytes / 1e9,
            smaller_row(blocks, reduce="auto"),
        )
    rows, peak, row = 1, one, one - kept
    while rows < max(num_rows, 2) and not any(most([2 * peak - kept > room])):
        less, peak = peak, peak_bytes(2 * rows)
        row = max(-(-(peak - less) // rows), 1)
        rows *= 2
    tightest, base, row, *sizes = most([-room, peak - rows * row, row, *sizes])
    found = TileMemory(-tightest, base, row, (0, *sizes[1:]) if sizes else ())
    if blocks is not None and any(found.kept):
        found = _scaled(found, peak_bytes, blocks, most)
    return found


def _scaled(
    found: TileMemory,
    peak_bytes: Callable[[int], int],
    blocks: Recomputation,
    most: Callable[[Sequence[int]], list[int]],
) -> TileMemory:
    """`found` with what kept blocks took in a rehearsal of one row, of as many as fit."""
    fewest = next((number for number in range(found.num_blocks) if found.rows(number) >= 1), found.num_blocks)
    expected = sum(found.kept[: found.num_blocks - fewest])
    if expected == 0:
        return found
    blocks.num_blocks = fewest
    (peak,) = most([peak_bytes(1)])
    taken = max(0, peak - found.base - found.row)
    return replace(found, kept=tuple(-(-size * taken // expected) for size in found.kept))


@contextmanager
def shortage_explained(what: str, num_rows: int, remedy: Callable[[], str]) -> Iterator[None]:
    """Context that raises the device's out-of-memory error as a RuntimeError with a remedy: settings that take less
    memory, asked for after the shortage. Other ranks may wait for this one in a collective, so the driver must end the
    run at the first rank's error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"digen.tsp must give tiles that fit into the device's memory, got {what} of {num_rows} row(s) that did "
            f"not ({str(error).splitlines()[0]}); {remedy()}"
        ) from error


def smaller_tile(rows: Sequence[Row]) -> str:
    """Settings of tiles with at most half of these rows, of which there are several, as the user types them.

    Example: 6 samples with 3 rows each
        smaller_tile(rows)  # "set digen.tsp.samples_per_tile=3 digen.tsp.steps_per_tile=3"
    """
    half = len(rows) // 2
    num_steps = min(half, max(Counter(row.sample for row in rows).values()))
    return f"set digen.tsp.samples_per_tile={half // num_steps} digen.tsp.steps_per_tile={num_steps}"


def smaller_row(blocks: Recomputation | None, reduce: str) -> str:
    """Settings under which one row takes less, as the user types them, without those that the run is known to have: all
    blocks recomputed, their inputs in host memory, and gradients reduced at each tile."""
    recomputes_all = blocks is not None and (blocks.num_blocks == ALL or blocks.share == 1.0)
    missing = [
        *([] if recomputes_all else ["actor_rollout_ref.model.recompute_blocks=all"]),
        *([] if blocks is not None and blocks.offloads else ["actor_rollout_ref.model.enable_activation_offload=true"]),
        *([] if reduce == "tile" else ["digen.tsp.reduce=tile"]),
    ]
    return f"set {' '.join(missing)}; if that is not enough, {SMALLER_SAMPLES}" if missing else SMALLER_SAMPLES


def gradients_may_wait(unreduced_bytes: int, free_bytes: int) -> bool:
    """True if gradients of this size may stay unreduced until the batch is complete."""
    return unreduced_bytes <= UNREDUCED_SHARE * free_bytes


def weights_may_stay(gathered_bytes: int) -> bool:
    """True if all weights may stay gathered while the trainer generates: on every rank they take at most
    `GATHERED_SHARE` of the free memory. Collective."""
    free = agreed_free_bytes()
    stays = gathered_bytes <= GATHERED_SHARE * free
    logger.debug(
        "an assist gathers %.1f GB %s; %.1f GB are free",
        gathered_bytes / 1e9,
        "once" if stays else "at every step",
        free / 1e9,
    )
    return stays


def state_to_come(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the optimizer's state that this rank's device does not hold yet, and will beside later tiles: Adam's
    moments before its first step, or a state that is offloaded now."""
    if optimizer is None:
        return 0
    if not optimizer.state:
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return NUM_MOMENTS * sum(local_shard(parameter).nbytes for parameter in trained if parameter.requires_grad)
    return sum(
        local_shard(value).nbytes
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, Tensor)
        and value.ndim > 0
        and value.device != parameter.device  # a count stays on the host
    )


def agreed_most(values: Sequence[int]) -> list[int]:
    """Maximum of all ranks' values, one by one. Collective; every rank has as many."""
    most = torch.tensor([int(value) for value in values], device=get_device_id())
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return most.tolist()


def most_of_ranks(value: int) -> int:
    """Maximum of all ranks' values. Collective."""
    return agreed_most([value])[0]


def agreed_free_bytes() -> int:
    """Free memory of the rank that has the least. Collective."""
    return -most_of_ranks(-device_memory.free_bytes(torch.distributed.get_world_size()))
