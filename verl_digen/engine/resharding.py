# SPDX-License-Identifier: Apache-2.0
"""This rank's part of a checkpoint: its own files, or pieces of those of ranks whose shards lay elsewhere.

| the checkpoint's ranks | class | a resumed run |
| --- | --- | --- |
| as many, with the same shards | `SameRanks` | continues bitwise |
| another number of them, or another `fsdp_size` | `OtherRanks` | continues as closely as sums in another order are |

`torch.distributed.checkpoint` says which piece of which saved shard a new shard needs
(`create_read_items_for_chunk_list`); the files stay verl's. Nothing is sent between ranks.

- A rank reads the numbers of its own shards, and no others. Beyond the model, the moments and the copies, which stay,
  memory holds one shard of one tensor. Per trained parameter fp32 weights have 4 bytes, Adam's moments 8, each copy
  (EMA, old) 4: with an EMA a rank of N reads 16 / N bytes per trained parameter.
- Numbers that are the same on all ranks come from rank 0: optimizer steps, learning rate, loss scale, counters.
- torch's random state is a rank's own, and means nothing to another number of ranks: there each rank keeps the state
  that it started with. No result depends on it: noise is drawn by (seed, uid, sample, k).
- Nothing else of a split is in a checkpoint: neither replicas nor `ulysses_sequence_parallel_size` nor the placement.

Invariants (tests/engine/test_resharding.py): weights, moments and copies are bitwise those that were saved; after three
more steps they are those of the run that went on, to 1e-6; every saved number is read by one rank of each replica.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from verl_digen.engine.fingerprint import first_fingerprint, frozen_fingerprint
from verl_digen.engine.saved_ranks import (
    SavedRanks,
    layout_of,
    live_part,
    narrowed,
    part_of,
    parts,
)
from verl_digen.require import require

State = Mapping[str, Tensor]
"""Tensors by state-dict name."""


class SameRanks:
    """Files of the rank that had this rank's shards."""

    def __init__(self, files: SavedRanks):
        self._files, self._rank = files, dist.get_rank()

    def has(self, kind: str) -> bool:
        """True if the checkpoint has files of this kind."""
        return self._files.has(kind, self._rank)

    def read(self, kind: str) -> Any:
        """Content of a file: this rank's own, or rank 0's."""
        return self._files.load(kind, self._rank)

    @property
    def tensors(self) -> State:
        """Saved tensors that train; read names and shapes alone."""
        return self._files.open("model", self._rank)

    def shard(self, name: str, live: Tensor) -> Tensor:
        """This rank's shard of a tensor that trains; `live` is the run's own."""
        return part_of(self.tensors[name])

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """A state for `optimizer.load_state_dict`."""
        return self.read("optim")

    def copies(self, saved: Mapping[str, State]) -> Mapping[str, State]:
        """This rank's shards of copies of the weights. `saved`: those of the file that `read` gives."""
        return saved

    def rng_state(self, extra: Mapping[str, Any]) -> dict[str, Any] | None:
        """Random states of this rank; None: it keeps its own. `extra`: the file of `read`."""
        return extra["rng"]

    def fingerprint(self, module: nn.Module) -> str:
        """Fingerprint of frozen weights that the file of `read` must have."""
        return frozen_fingerprint(module)

    def num_updates(self, saved: Mapping[str, Any] | None) -> dict[int, int | None]:
        """Saved rank -> optimizer steps that its file counts, of the files that this rank looks into; None: it has no
        file. `saved`: the file of `read`, or None."""
        return {self._rank: None if saved is None else saved["num_updates"]}


class OtherRanks:
    """Pieces of the files of ranks whose shards lay elsewhere. See the module; methods are those of `SameRanks`.

    Args:
        live: the run's own tensors that train.

    Raises:
        ValueError: files of a rank are missing.
    """

    def __init__(self, files: SavedRanks, live: State):
        self._files, self._live = files, live
        self.num_bytes = 0
        """Bytes read so far of shards."""
        for kind in ("model", *(kind for kind in ("optim", "digen_state") if files.has(kind))):
            files.require_all(kind)

    def has(self, kind: str) -> bool:
        """See `SameRanks`."""
        return self._files.has(kind)

    def read(self, kind: str) -> Any:
        """See `SameRanks`; rank 0's."""
        return self._files.open(kind, 0)

    @property
    def tensors(self) -> State:
        """See `SameRanks`."""
        return self.read("model")

    def shard(self, name: str, live: Tensor) -> Tensor:
        """See `SameRanks`."""
        return self._piece(name, live, self.tensors[name], lambda rank: self._files.open("model", rank)[name])

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `SameRanks`."""
        saved = self.read("optim")
        live = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        require(
            len(numbers) == len(live),
            f"a checkpoint must hold the optimizer of the {len(live)} tensors that this run trains",
            f"that of {len(numbers)}",
            "train the same weights",
        )
        state = {
            number: {key: self._moment(number, key, value, live[number]) for key, value in values.items()}
            for number, values in saved["state"].items()
        }
        return {"state": state, "param_groups": saved["param_groups"]}

    def _moment(self, number: int, key: str, saved: Any, live: Tensor) -> Any:
        """This rank's part of an optimizer's value `key` for the parameter `live`, its `number`-th."""
        if not isinstance(saved, Tensor):
            return saved
        if saved.ndim == 0:  # e.g. the number of steps
            return saved.clone()
        require(
            type(part_of(saved)) is Tensor and isinstance(saved, DTensor) == isinstance(live, DTensor),
            "an optimizer must keep its state as tensors of the parameters' shapes to continue on other ranks",
            f"{key!r} of type {type(part_of(saved)).__name__}",
            f"resume on {self._files.num_ranks} ranks with the same fsdp_size",
        )
        moment = torch.empty_like(live.detach(), dtype=saved.dtype)
        read = self._piece(
            f"{key} of parameter {number}",
            live,
            saved,
            lambda rank: self._files.open("optim", rank)["state"][number][key],
        )
        part_of(moment).copy_(read)
        return moment

    def copies(self, saved: Mapping[str, State]) -> Mapping[str, State]:
        """See `SameRanks`. A shard is read when it is asked for."""

        def reader(policy: str) -> Callable[[str], Tensor]:
            return lambda name: self._piece(
                f"{policy}'s {name}",
                self._live[name],
                self.tensors[name],
                lambda rank: self._files.open("digen_state", rank)["copies"][policy][name],
            )

        return {policy: _ReadLate(tensors.keys(), reader(policy)) for policy, tensors in saved.items()}

    def _piece(self, what: str, live: Tensor, like: Tensor, of_rank: Callable[[int], Tensor]) -> Tensor:
        """This rank's shard, on the CPU, of a tensor that was distributed as `like` and shall be as `live`.

        Raises:
            ValueError: shapes differ, or a file is not of the save that the others are of.
        """
        require(
            live.shape == like.shape,
            f"{what} must have the shape {tuple(live.shape)} of the weights that this run trains",
            tuple(like.shape),
            "train the same weights",
        )
        wanted = live_part(live)
        pieces = parts(like)
        ranks = list(pieces)
        target = torch.empty(wanted.sizes, dtype=part_of(of_rank(ranks[0])).dtype if ranks else like.dtype)
        saved = TensorStorageMetadata(TensorProperties(target.dtype), like.shape, list(pieces.values()))
        for item in create_read_items_for_chunk_list(what, saved, [wanted] if target.numel() else []):
            assert item.storage_index.index is not None
            rank = ranks[item.storage_index.index]
            shard = part_of(of_rank(rank))
            require(
                shard.shape == pieces[rank].sizes,
                f"{what} of rank {rank} must be a shard of {tuple(pieces[rank].sizes)} in {str(self._files.folder)!r}",
                tuple(shard.shape),
                "copy the files of one save, of all its ranks",
            )
            source = narrowed(shard, item.storage_offsets, item.lengths)
            narrowed(target, item.dest_offsets, item.lengths).copy_(source)
            self.num_bytes += source.nbytes
        return target

    def rng_state(self, extra: Mapping[str, Any]) -> dict[str, Any] | None:
        """See `SameRanks`; None if there were more or fewer ranks."""
        is_known = self._files.num_ranks == dist.get_world_size()
        return self._files.load("extra_state", dist.get_rank())["rng"] if is_known else None

    def fingerprint(self, module: nn.Module) -> str:
        """See `SameRanks`; collective."""
        return first_fingerprint(module, layout_of(self.tensors.values()))

    def num_updates(self, saved: Mapping[str, Any] | None) -> dict[int, int | None]:
        """See `SameRanks`. The ranks share the files."""
        if saved is None:
            return {}
        ranks = range(dist.get_rank(), self._files.num_ranks, dist.get_world_size())
        return {rank: self._files.open("digen_state", rank)["num_updates"] for rank in ranks}


class _ReadLate(Mapping[str, Tensor]):
    """Tensors that are read when they are asked for."""

    def __init__(self, names: Collection[str], read: Callable[[str], Tensor]):
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def are_same_ranks(files: SavedRanks, live: State) -> bool:
    """True if this rank's shards of `live`, the run's tensors that train, are those of the saved rank."""
    rank = dist.get_rank()
    if files.num_ranks != dist.get_world_size():
        return False
    saved, ours = layout_of(files.open("model", rank).values()), layout_of(live.values())
    if saved is None or ours is None:
        return saved is ours
    return saved.placements == ours.placements and torch.equal(saved.device_mesh.mesh, ours.device_mesh.mesh)
