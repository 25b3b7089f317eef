# SPDX-License-Identifier: Apache-2.0
"""Peak of the bytes that some code allocates, on fake tensors: each storage from its first use until it is freed.

Example:
    with FakeTensorMode(), PeakBytes() as allocated:
        network(torch.empty(1, 3, 512, 512))
    allocated.peak  # bytes
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Count what is allocated inside the context.

    Args:
        known: tensors that are there already and do not count, nor do views of them.
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        self.current = 0
        self.peak = 0
        self._kept = [tensor.untyped_storage() for tensor in known]
        """Storages that are there already; kept, so that none of their addresses is given to another."""
        self._seen = {storage._cdata for storage in self._kept}
        self._number_of: dict[int, int] = {}
        """Live storage -> its number."""
        self._events: list[tuple[int, int]] = []
        """(number of the storage, bytes allocated or, below 0, freed), in order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._seen:
            return
        self._seen.add(address)
        self.current += storage.nbytes()
        self.peak = max(self.peak, self.current)
        number = self._number_of[address] = len(self._events)
        self._events.append((number, storage.nbytes()))
        weakref.finalize(storage, self._free, address, storage.nbytes())

    def _free(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self._events.append((self._number_of.pop(address), -size))
        self.current -= size

    def peaks(self, apart: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
        """(bytes of other tensors, bytes of the tensors `apart`) at the moments at which, by some weight of the two,
        most is allocated.

        Args:
            apart: live tensors that were allocated in the context.
        """
        numbers = {self._number_of[tensor.untyped_storage()._cdata] for tensor in apart}
        held, moments = [0, 0], set()
        for number, size in self._events:
            held[number in numbers] += size
            moments.add((held[0], held[1]))
        front: list[tuple[int, int]] = []
        for moment in sorted(moments, reverse=True):
            if not front or moment[1] > front[-1][1]:
                front.append(moment)
        return tuple(front)
