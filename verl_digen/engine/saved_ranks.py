# SPDX-License-Identifier: Apache-2.0
"""Files that the ranks of a run saved into one checkpoint, and the parts of tensors that are in them.

Read without a process group, and by ranks of another number than saved them: `verl_digen.engine.resharding` for a
resume, `verl_digen.export` for other tools. Files are mapped, not read: a page is read when a number on it is.

Invariants (tests/engine/test_resharding.py): the parts of a tensor cover it once; files of several saves are refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Placement, Shard

from verl_digen.require import require

SAVE_KEY = "actor_rollout_ref.actor.checkpoint.save_contents"
CONTENTS = {"model": "model", "optim": "optimizer", "extra_state": "extra", "digen_state": "extra"}
"""Kind of file -> its name in `SAVE_KEY`."""


def shard_file(kind: str, num_ranks: int, rank: int) -> str:
    """Name of a rank's file; verl's."""
    return f"{kind}_world_size_{num_ranks}_rank_{rank}.pt"


class SavedRanks:
    """Files of one checkpoint, each opened once.

    Args:
        folder: the checkpoint's folder `actor`.

    Raises:
        ValueError: it holds no weights, or those of runs on several numbers of ranks.
    """

    def __init__(self, folder: Path):
        found = [re.fullmatch(r"model_world_size_(\d+)_rank_\d+\.pt", path.name) for path in folder.glob("model_*")]
        counts = sorted({int(match[1]) for match in found if match})
        require(
            len(counts) == 1,
            f"{str(folder)!r} must hold the weights that one run saved",
            f"files of {' and of '.join(map(str, counts)) or 'no'} ranks",
            "take a folder as it was saved" if counts else f"{SAVE_KEY} must have had model: take another checkpoint",
        )
        self.folder, self.num_ranks = folder, counts[0]
        self._opened: dict[tuple[str, int], Any] = {}

    def has(self, kind: str, rank: int = 0) -> bool:
        """True if the rank's file of this kind is there."""
        return self.path(kind, rank).is_file()

    def path(self, kind: str, rank: int) -> Path:
        """The rank's file of this kind."""
        return self.folder / shard_file(kind, self.num_ranks, rank)

    def require_all(self, kind: str) -> None:
        """Raise ValueError unless every rank's file of this kind is there; names those that are not."""
        self._require(kind, range(self.num_ranks))

    def _require(self, kind: str, ranks: Iterable[int]) -> None:
        absent = [self.path(kind, rank).name for rank in ranks if not self.has(kind, rank)]
        require(
            not absent,
            f"{str(self.folder)!r} must hold the {CONTENTS[kind]} of all {self.num_ranks} ranks",
            f"a folder without {', '.join(absent)}",
            f"copy the files of all nodes into it; {SAVE_KEY} must have had {CONTENTS[kind]}",
        )

    def load(self, kind: str, rank: int) -> Any:
        """Content of a rank's file, in memory.

        Raises:
            ValueError: it is not there, or damaged.
        """
        self._require(kind, [rank])
        return load_file(self.path(kind, rank), mapped=False)

    def open(self, kind: str, rank: int) -> Any:
        """`load`, once, and with tensors that stay in the file until they are read; do not write to them."""
        if (kind, rank) not in self._opened:
            self._require(kind, [rank])
            self._opened[kind, rank] = load_file(self.path(kind, rank), mapped=True)
        return self._opened[kind, rank]


def load_file(path: Path, *, mapped: bool) -> Any:
    """Content of a file of a checkpoint, on the host, whatever device it was saved from.

    Args:
        mapped: tensors stay in the file until they are read.

    Raises:
        ValueError: it is damaged.
    """
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that a tensor's process group is not there
    try:
        # a pickle that this package wrote: RNG states, schedules and meshes are not among the types of weights_only
        return torch.load(path, map_location="cpu", mmap=mapped, weights_only=False)
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{str(path)!r} must be a whole file of a checkpoint, got {error}; copy it again") from error
    finally:
        logger.setLevel(level)


def part_of(value: Tensor) -> Tensor:
    """The part of a tensor that its rank has."""
    return value.to_local() if isinstance(value, DTensor) else value


def parts(value: Tensor) -> dict[int, ChunkStorageMetadata]:
    """Rank -> its part of a saved tensor, without empty ones; of ranks with the same part the first."""
    if not isinstance(value, DTensor):
        return {0: whole(value.shape)}
    return laid_out(value.shape, value.device_mesh.mesh, value.placements)


def live_part(value: Tensor) -> ChunkStorageMetadata:
    """This rank's part of a tensor of the module."""
    return value.__create_chunk_list__()[0] if isinstance(value, DTensor) else whole(value.shape)


def layout_of(tensors: Iterable[Tensor]) -> DTensor | None:
    """A tensor that is distributed as FSDP2 distributes all of them; None where ranks have whole tensors."""
    return next((value for value in tensors if isinstance(value, DTensor)), None)


def whole(shape: Sequence[int]) -> ChunkStorageMetadata:
    """The part that is a whole tensor of this shape."""
    return ChunkStorageMetadata(offsets=Size([0] * len(shape)), sizes=Size(shape))


def laid_out(shape: Sequence[int], mesh: Tensor, placements: Sequence[Placement]) -> dict[int, ChunkStorageMetadata]:
    """Rank -> its part of a tensor of this shape; see `parts`.

    Args:
        mesh: ranks, one dimension for each placement.

    Raises:
        ValueError: a placement other than FSDP2's.
    """
    found: dict[int, ChunkStorageMetadata] = {}

    def cut(mesh: Tensor, placements: Sequence[Placement], part: ChunkStorageMetadata) -> None:
        if mesh.ndim == 0:
            if part.sizes.numel():
                found[int(mesh)] = part
            return
        placement, *inner = placements
        if placement.is_replicate():
            cut(mesh[0], inner, part)
            return
        if type(placement) is not Shard:
            raise ValueError(f"tensors of a checkpoint must be sharded or replicated, got {placement}; save it again")
        dim, rows = placement.dim, part.sizes[placement.dim]
        rows_each = -(-rows // len(mesh))  # as torch.chunk cuts: the last parts may be smaller, or empty
        for number, ranks in enumerate(mesh):
            offsets, sizes = list(part.offsets), list(part.sizes)
            first = min(number * rows_each, rows)
            offsets[dim], sizes[dim] = offsets[dim] + first, min(rows_each, rows - first)
            cut(ranks, inner, ChunkStorageMetadata(offsets=Size(offsets), sizes=Size(sizes)))

    cut(mesh, placements, whole(shape))
    return found


def narrowed(value: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """View of a tensor: `sizes` numbers per dimension from `offsets` on."""
    return value[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
