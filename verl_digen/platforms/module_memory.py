# SPDX-License-Identifier: Apache-2.0
"""Release of modules' device memory, and its return.

Tensors stay the objects they are; their storage is emptied. Weights that never change are copied to the host once, at
the first release, and kept there: after that a release copies nothing, and a return costs one copy to the device.
Weights that every update replaces are not copied at all: after a return their numbers are undefined until then.

Invariants (tests/platforms/test_module_memory.py): a release frees every byte; a return gives back every number that no
update replaces; the second release copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage, nn

from verl_digen.weights.host_pool import pool_for


class DeviceMemory:
    """The storage of the parameters and buffers of `modules`, all on `device`."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device):
        self._modules = tuple(modules)
        self._device = device
        self._pool = pool_for(device)
        self._kept: dict[int, Tensor] = {}
        """Host copies, by storage."""
        self._released: list[tuple[UntypedStorage, int]] = []
        """Storages without memory, each with its size in bytes."""
        self.num_bytes_copied_out = 0
        """Bytes that all releases copied to the host."""

    @property
    def is_released(self) -> bool:
        """True between `release` and `restore`."""
        return bool(self._released)

    def release(self, replaced: Callable[[], Iterable[Tensor]] = tuple) -> int:
        """Free the memory -> bytes freed; 0 if it is free already. Does not wait for the copies to the host.

        Args:
            replaced: returns the tensors of the modules that an update will replace.
        """
        if self._released:
            return 0
        storages = list(self._storages())
        undefined = {_key(tensor.untyped_storage()) for tensor in replaced()}
        for storage in storages:
            if _key(storage) not in undefined and _key(storage) not in self._kept:
                on_device = _as_bytes(storage, self._device)
                self._kept[_key(storage)] = self._pool.empty_like(on_device).copy_(on_device, non_blocking=True)
                self.num_bytes_copied_out += storage.nbytes()
            self._released.append((storage, storage.nbytes()))
        for storage, _ in self._released:
            storage.resize_(0)
        return sum(num_bytes for _, num_bytes in self._released)

    def restore(self) -> None:
        """Allocate the memory again and fill it; does not wait for the copies."""
        for storage, num_bytes in self._released:
            storage.resize_(num_bytes)
            if (kept := self._kept.get(_key(storage))) is not None:
                _as_bytes(storage, self._device).copy_(kept, non_blocking=True)
        self._released = []

    def _storages(self) -> Iterator[UntypedStorage]:
        """Each storage once, although tensors may share one."""
        seen: set[int] = set()
        for module in self._modules:
            for tensor in (*module.parameters(), *module.buffers()):
                if not tensor.untyped_storage().resizable():  # on the CPU: mapped from a file
                    tensor.data = tensor.data.clone()
                storage = tensor.untyped_storage()
                if storage.nbytes() and _key(storage) not in seen:
                    seen.add(_key(storage))
                    yield storage


def _key(storage: UntypedStorage) -> int:
    """Identity of a storage; unlike its address it survives a release."""
    return storage._cdata


def _as_bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    """All of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
