# SPDX-License-Identifier: Apache-2.0
"""Release of modules' device memory, and its return.

Tensors stay the objects they are; their storage is emptied. Weights that never change are copied to the host once, at
the first release, and kept there: after that a release copies nothing, and a return costs one copy to the device.
Weights that every update replaces are not copied at all: after a return their numbers are undefined until then.
Processes of one node with equal weights share a copy (`verl_digen.weights.shared_copy`), one for each module.

Invariants (tests/platforms/test_module_memory.py): a release frees every byte; a return gives back every number that no
update replaces; the second release copies nothing; of processes that share, one copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor, UntypedStorage, nn

from verl_digen.weights.host_pool import pool_for
from verl_digen.weights.shared_copy import SharedCopy, shared_copy

logger = logging.getLogger(__name__)

SHARING = ("cpu", "cuda")
"""Types of devices whose copies are shared; others have no way to page-lock memory that is not PyTorch's."""


class DeviceMemory:
    """The storage of the parameters and buffers of `modules`, all on `device`.

    Args:
        share_as: name under which processes of this node share the host copies of a module of the same number; None:
            this process has its own.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device, share_as: str | None = None):
        self._modules = tuple(modules)
        self._device = device
        self._share_as = share_as if device.type in SHARING else None
        self._shared: list[SharedCopy] = []
        self._pool = pool_for(device)
        self._kept: dict[int, Tensor] = {}
        """Host copies, by storage."""
        self._released: list[tuple[UntypedStorage, int]] = []
        """Storages without memory, each with its size in bytes."""
        self.num_bytes_copied_out = 0
        """Bytes that all releases copied to the host."""
        self.num_bytes_shared = 0
        """Bytes of the host copies that another process made."""

    @property
    def is_released(self) -> bool:
        """True between `release` and `restore`."""
        return bool(self._released)

    def release(self, replaced: Callable[[], Iterable[Tensor]] = tuple) -> int:
        """Free the memory -> bytes freed; 0 if it is free already. Does not wait for copies to the host that are not
        shared.

        Args:
            replaced: returns the tensors of the modules that an update will replace.
        """
        if self._released:
            return 0
        storages = list(self._storages())
        undefined = {_key(tensor.untyped_storage()) for tensor in replaced()}
        new = [each for each in storages if _key(each[1]) not in undefined and _key(each[1]) not in self._kept]
        for number, of_module in groupby(new, key=lambda each: each[0]):
            self._keep(number, [storage for _, storage in of_module])
        self._released = [(storage, storage.nbytes()) for _, storage in storages]
        for storage, _ in self._released:
            storage.resize_(0)
        return sum(num_bytes for _, num_bytes in self._released)

    def _keep(self, number: int, storages: Sequence[UntypedStorage]) -> None:
        """Copy storages of a module to the host, or find the copy of another process."""
        on_device = [_as_bytes(storage, self._device) for storage in storages]
        keys, size = [_key(storage) for storage in storages], sum(storage.nbytes() for storage in storages)
        if self._share_as is not None:
            shared = shared_copy(f"{self._share_as}-{number}", on_device, device=self._device)
            if shared is not None:
                self._shared.append(shared)
                self._kept |= dict(zip(keys, shared.parts, strict=True))
                self.num_bytes_copied_out += size if shared.is_new else 0
                self.num_bytes_shared += 0 if shared.is_new else size
                return
            logger.warning("this process has other weights than the node's copy, and keeps %.1f GB", size / 1e9)
        for key, each in zip(keys, on_device, strict=True):
            self._kept[key] = self._pool.empty_like(each).copy_(each, non_blocking=True)
        self.num_bytes_copied_out += size

    def restore(self) -> None:
        """Allocate the memory again and fill it; does not wait for the copies."""
        for storage, num_bytes in self._released:
            storage.resize_(num_bytes)
            if (kept := self._kept.get(_key(storage))) is not None:
                _as_bytes(storage, self._device).copy_(kept, non_blocking=True)
        self._released = []

    def _storages(self) -> Iterator[tuple[int, UntypedStorage]]:
        """(number of its first module, storage), each once, although tensors may share one."""
        seen: set[int] = set()
        for number, module in enumerate(self._modules):
            for tensor in (*module.parameters(), *module.buffers()):
                if not tensor.untyped_storage().resizable():  # on the CPU: mapped from a file
                    tensor.data = tensor.data.clone()
                storage = tensor.untyped_storage()
                if storage.nbytes() and _key(storage) not in seen:
                    seen.add(_key(storage))
                    yield number, storage


def _key(storage: UntypedStorage) -> int:
    """Identity of a storage; unlike its address it survives a release."""
    return storage._cdata


def _as_bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    """All of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
