# SPDX-License-Identifier: Apache-2.0
"""Memory of the pretend device: bytes of live storages, their peak, and a limit."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

TOTAL_BYTES = 1 << 40
"""Memory of the device unless `limited`: more than the host has."""


class Memory:
    """Ledger of live storages. A storage counts from the first tensor that wraps it until its last tensor is gone."""

    def __init__(self) -> None:
        self.total, self.allocated, self.peak = TOTAL_BYTES, 0, 0
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def track(self, tensor: Tensor) -> None:
        """Count the tensor's storage, if it is new.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live and self._live[key][0]() is storage:
            return
        if self.allocated + size > self.total:
            raise torch.OutOfMemoryError(
                f"pretend out of memory: {self.allocated} of {self.total} bytes are allocated, {size} more do not fit"
            )
        self._live[key] = weakref.ref(storage, lambda gone: self._forget(key, gone)), size
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def recount(self) -> int:
        """Count storages that were resized since -> bytes allocated."""
        for key, (storage, size) in list(self._live.items()):
            if (live := storage()) is not None and live.nbytes() != size:
                self._live[key] = storage, live.nbytes()
                self.allocated += live.nbytes() - size
        return self.allocated

    def _forget(self, key: int, gone: weakref.ref[torch.UntypedStorage]) -> None:
        if key in self._live and self._live[key][0] is gone:
            self.allocated -= self._live.pop(key)[1]

    @contextmanager
    def limited(self, total: int) -> Iterator[None]:
        """Context in which the device has this much memory, in bytes."""
        before, self.total = self.total, total
        try:
            yield
        finally:
            self.total = before


memory = Memory()
"""The one device's."""
