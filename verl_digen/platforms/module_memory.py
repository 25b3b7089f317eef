# SPDX-License-Identifier: Apache-2.0
"""Release of modules' device memory, and its return.

Tensors stay the objects they are; their storage is emptied. Weights that never change are copied to the host once, at
the first release, and kept there: after that a release copies nothing, and a return costs one copy to the device.
Weights that every update replaces are not copied at all where an update follows: after a return their numbers are
undefined until then. Where none follows they are copied at every release. Processes of one node with equal weights
share a copy (`verl_digen.weights.host_copies`), one for the parameters of each module and one for its buffers.

Invariants (tests/platforms/test_module_memory.py): a release frees every byte; a return gives back every number that no
update replaces; the second release copies nothing; of processes that share, one copies.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, repeat

import ray
import torch
from torch import Tensor, UntypedStorage, nn

from verl_digen.weights.host_copies import HostPool, SharedCopy, shared_copy

logger = logging.getLogger(__name__)

SHARING = ("cpu", "cuda")
"""Types of devices whose copies are shared; others have no way to page-lock memory that is not PyTorch's."""


def name_on_node() -> str | None:
    """Name under which the processes of this run share memory on a node; None outside of Ray: there is no other."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return f"{context.get_session_name()}-{context.get_job_id()}"


def parameters_of(share_as: str | None, number: int) -> str | None:
    """Name of the copy of the parameters of a process's module of this number; 0 is the transformer."""
    return None if share_as is None else f"{share_as}-{number}"


def host_copies(name: str | None, weights: Sequence[Tensor], device: torch.device, pool: HostPool) -> SharedCopy:
    """Host copies of `weights`, uint8 [num_bytes] each, on `device`: the node's of this name, see `shared_copy`, or
    this process's, which may be on their way."""
    if name is not None and device.type in SHARING:
        shared = shared_copy(name, weights, device=device)
        if shared is not None:
            return shared
        size = sum(map(len, weights))
        logger.warning("this process has other weights than the node's copy, and keeps %.1f GB", size / 1e9)
    return SharedCopy(tuple(pool.empty_like(each).copy_(each, non_blocking=True) for each in weights), True)


class DeviceMemory:
    """The storage of the parameters and buffers of `modules`, all on `device`. `share_as` names the host copies that
    processes of this node share, of a module of the same number; None: this process has its own."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device, share_as: str | None = None):
        self._modules = tuple(modules)
        self._device = device
        self._share_as = share_as
        self._pool = HostPool(device)
        self._kept: dict[int, Tensor] = {}
        """Host copies, by storage."""
        self._undefined: set[int] = set()
        """Storages that were not copied at the last release."""
        self._released: list[tuple[UntypedStorage, int]] = []
        """Storages without memory, each with its size in bytes."""
        self.num_bytes_copied_out = 0
        """Bytes that all releases copied to the host."""

    @property
    def num_bytes(self) -> int:
        """Device memory of the modules while it is not released."""
        return sum(storage.nbytes() for _, storage in self._storages())

    @property
    def is_released(self) -> bool:
        """True between `release` and `restore`."""
        return bool(self._released)

    def release(
        self, replaced: Callable[[], Iterable[Tensor]] = tuple, changed: Callable[[], Iterable[Tensor]] = tuple
    ) -> int:
        """Free the memory -> bytes freed; 0 if it is free already. Does not wait for copies to the host that are not
        shared.

        `replaced` returns the tensors of the modules that an update will replace, `changed` those whose numbers may be
        others than at the last release.
        """
        if self._released:
            return 0
        storages = list(self._storages())
        self._undefined, stale = ({_key(tensor.untyped_storage()) for tensor in get()} for get in (replaced, changed))
        known = self._undefined | stale | self._kept.keys()
        new = [each for each in storages if _key(each[1]) not in known]
        for name, of_module in groupby(new, key=lambda each: each[0]):
            self._keep(name, [storage for _, storage in of_module])
        for _, storage in storages:
            if _key(storage) in stale:
                self._keep_again(storage)
        self._released = [(storage, storage.nbytes()) for _, storage in storages]
        for storage, _ in self._released:
            storage.resize_(0)
        return sum(num_bytes for _, num_bytes in self._released)

    def _keep(self, name: str | None, storages: Sequence[UntypedStorage]) -> None:
        """Copy storages to the host, or find the copy of another process."""
        copies = host_copies(name, [_as_bytes(each, self._device) for each in storages], self._device, self._pool)
        self._kept |= dict(zip(map(_key, storages), copies.parts, strict=True))
        if copies.is_new:
            self.num_bytes_copied_out += sum(storage.nbytes() for storage in storages)

    def _keep_again(self, storage: UntypedStorage) -> None:
        """Copy a storage to the host, where its last copy was."""
        device_bytes = _as_bytes(storage, self._device)
        if (key := _key(storage)) not in self._kept:
            self._kept[key] = self._pool.empty_like(device_bytes)
        self._kept[key].copy_(device_bytes, non_blocking=True)
        self.num_bytes_copied_out += len(device_bytes)

    def restore(self) -> None:
        """Allocate the memory again and fill it; does not wait for the copies."""
        for storage, num_bytes in self._released:
            storage.resize_(num_bytes)
            if (key := _key(storage)) not in self._undefined:
                _as_bytes(storage, self._device).copy_(self._kept[key], non_blocking=True)
        self._released = []

    def _storages(self) -> Iterator[tuple[str | None, UntypedStorage]]:
        """(name of the shared copy it belongs to, storage), each storage once, although tensors may share one."""
        seen: set[int] = set()
        for number, module in enumerate(self._modules):
            of_parameters = parameters_of(self._share_as, number)
            of_buffers = of_parameters and f"{of_parameters}-buffers"  # a trainer shares no buffers
            named = chain(zip(repeat(of_parameters), module.parameters()), zip(repeat(of_buffers), module.buffers()))
            for name, tensor in named:
                if not tensor.untyped_storage().resizable():  # on the CPU: mapped from a file
                    tensor.data = tensor.data.clone()
                storage = tensor.untyped_storage()
                if storage.nbytes() and _key(storage) not in seen:
                    seen.add(_key(storage))
                    yield name, storage


def _key(storage: UntypedStorage) -> int:
    """Identity of a storage; unlike its address it survives a release."""
    return storage._cdata


def _as_bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
