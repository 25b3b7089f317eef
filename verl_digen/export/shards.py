# SPDX-License-Identifier: Apache-2.0
"""Whole tensors from the files of all ranks of a checkpoint, on the CPU, without a process group.

- Files are mapped, not read: memory holds one whole tensor at a time.
- verl's `FSDPModelMerger` does the same for language models: all tensors at once, in bf16, the trained policy alone.
  Its rule for tensors that are not sharded is used here.
- A copy of the weights (EMA, old) is saved as bare shards; they lie as those of the parameter of the same name.

Invariant (tests/export/test_export.py): the tensors are bitwise those that the engine exports, for 1 and 2 ranks, with
shards and with replicas of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.model_merger.fsdp_model_merger import merge_non_dtensor_shards

from verl_digen.engine.copies import AVERAGE, CURRENT
from verl_digen.engine.saved_ranks import SavedRanks, narrowed, part_of, parts
from verl_digen.require import require_one_of

EMA = "ema"
"""Policy `average`, as it is typed."""


class Shards:
    """Files that the ranks of a run saved.

    Args:
        actor: the checkpoint's folder `actor`.

    Raises:
        ValueError: a rank's weights are missing.
    """

    def __init__(self, actor: Path):
        self._saved = SavedRanks(actor)
        self._saved.require_all("model")

    @cached_property
    def policies(self) -> tuple[str, ...]:
        """Policies that can be read, as they are typed."""
        return (CURRENT, *(EMA if name == AVERAGE else name for name in self._copies(0)))

    @property
    def names(self) -> list[str]:
        """State-dict names of all saved tensors, in order."""
        return list(self._trained(0))

    def tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        """(state-dict name, whole tensor) of each saved tensor; those that a copy does not have are the trained ones.

        Raises:
            ValueError: the checkpoint has no such policy; lists those that it has.
        """
        policy = EMA if policy == AVERAGE else policy
        require_one_of("--policy", policy, self.policies)
        copy = AVERAGE if policy == EMA else policy
        for name, first in self._trained(0).items():
            if policy != CURRENT and name in self._copies(0)[copy]:
                yield name, _joined(first, lambda rank, name=name: self._copies(rank)[copy][name])
            elif isinstance(first, DTensor):
                yield name, _joined(first, lambda rank, name=name: part_of(self._trained(rank)[name]))
            else:
                values = [self._trained(rank)[name] for rank in range(self._saved.num_ranks)]
                yield name, merge_non_dtensor_shards(name, values)

    def _trained(self, rank: int) -> Mapping[str, Tensor]:
        """State dict of a rank."""
        return self._saved.open("model", rank)

    def _copies(self, rank: int) -> Mapping[str, Mapping[str, Tensor]]:
        """Policy -> name -> shard of a rank. Without saved copies, {}."""
        return self._saved.open("digen_state", rank)["copies"] if self._saved.has("digen_state") else {}


def _joined(like: Tensor, part: Callable[[int], Tensor]) -> Tensor:
    """The tensor of which rank r has `part(r)`, distributed as `like`."""
    pieces = parts(like)
    joined = torch.empty(like.shape, dtype=part(next(iter(pieces), 0)).dtype)
    for rank, piece in pieces.items():
        narrowed(joined, piece.offsets, piece.sizes).copy_(part(rank))
    return joined
