# SPDX-License-Identifier: Apache-2.0
"""Host copies of device tensors: a pool of memory, and one copy of equal weights for all processes of a node that keep
them.

    first process     a memory file (memfd) of its weights, under a name
    the others        find the name among the open files of this user's processes, and map the same memory
    each              compares the copy with its own weights, number by number, before it relies on it

- Linux frees a memory file when its last process ends, in whatever way. Nothing lies in a folder, and the limit of
  /dev/shm does not apply. Memory that is mapped keeps its file open, although the process that made it has ended.
- A lock (an abstract socket, which ends with its process) lets one process at a time look and write.

Invariants (tests/weights/test_shared_copy.py): processes with equal weights hold them once; other weights are not mixed
up; a copy outlives the process that made it, and not the last one that maps it.
"""

import errno
import logging
import math
import mmap
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 20
"""Size of a chunk; a larger tensor has a chunk of its own."""
ALIGNMENT_BYTES = 64
"""Each tensor starts at a multiple of it; larger than any number."""
LOCK_S = 600.0
"""Timeout of the lock: a process writes tens of gigabytes under it."""
PAUSE_S = 0.05
"""Pause between two attempts to take the lock."""
COMPARED_BYTES = 64 << 20
"""Device memory that a comparison takes at a time."""
READY = 1
"""First byte of a complete file."""


class HostPool:
    """Allocator of tensors that live as long as the pool, for copies of tensors on `device`: page-locked if that is an
    accelerator, so that copies are asynchronous. PyTorch rounds page-locked allocations up to a power of two. So
    tensors share chunks that are one.

    Example:
        pool = HostPool(device)
        pool.empty_like(torch.zeros(3, device=device))   # on the CPU
    """

    def __init__(self, device: torch.device):
        self._is_pinned = device.type != "cpu"
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """An uninitialised contiguous tensor on the CPU of the same shape and dtype."""
        size = math.ceil(tensor.nbytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if size > len(self._free):
            self._free = torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8, pin_memory=self._is_pinned)
        taken, self._free = self._free[:size], self._free[size:]
        return taken[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True)
class SharedCopy:
    """Host copies of weights, in the memory of a file that other processes map, too."""

    parts: tuple[Tensor, ...]
    """uint8 [num_bytes] of each of the weights, in their order."""
    is_new: bool
    """True if this process wrote them."""


def shared_copy(name: str, weights: Sequence[Tensor], *, device: torch.device) -> SharedCopy | None:
    """The node's copy of `weights`, made if there is none; None if there is one of other weights under this name.

    The name is of these weights on this node, letters, digits and `-_.`; weights are uint8 [num_bytes] each, on
    `device`. TimeoutError if another process holds the lock for longer than `LOCK_S`.
    """
    sizes = [len(each) for each in weights]
    starts = [ALIGNMENT_BYTES]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    label = f"digen-{name}-{starts[-1]}"

    def parts(whole: Tensor) -> tuple[Tensor, ...]:
        return tuple(whole[start : start + size] for start, size in zip(starts, sizes, strict=False))

    with _locked(label):
        whole = _find(label)
        if whole is None:
            with FileIO(os.memfd_create(label), "r+") as file:
                file.truncate(starts[-1])
                whole = _mapped(file)
            _page_lock(whole, device)
            for part, own in zip(parts(whole), weights, strict=True):
                part.copy_(own, non_blocking=True)
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)
            whole[0] = READY
            return SharedCopy(parts(whole), True)
    if not all(map(_is_equal, parts(whole), weights)):
        return None
    _page_lock(whole, device)
    return SharedCopy(parts(whole), False)


def _mapped(file: FileIO) -> Tensor:
    """uint8 [num_bytes] of the memory of a file, which stays open as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size), dtype=torch.uint8)


@contextmanager
def _locked(label: str) -> Iterator[None]:
    """Context that one process of the node is in at a time."""
    deadline = time.monotonic() + LOCK_S
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind(f"\0{label}")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the host copy {label!r} must be written within {LOCK_S:g} s, but another process is still at "
                        "it; look in the log for a process that hangs in its first sleep or offload"
                    ) from error
            time.sleep(PAUSE_S)
        yield


def _find(label: str) -> Tensor | None:
    """The complete memory file of this label, mapped; None if no process of this user has one."""
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # the process ended, or is another user's
            for number in os.listdir(f"/proc/{process}/fd"):
                with suppress(OSError):  # it was closed meanwhile
                    link = f"/proc/{process}/fd/{number}"
                    if os.readlink(link) == f"/memfd:{label} (deleted)":
                        with FileIO(link, "r+") as file:
                            whole = _mapped(file)
                        if whole[0] == READY:  # else its process ends, or failed, while it wrote
                            return whole
    return None


def _is_equal(part: Tensor, own: Tensor) -> bool:
    pairs = zip(part.split(COMPARED_BYTES), own.split(COMPARED_BYTES), strict=True)
    return all(torch.equal(one.to(own.device), other) for one, other in pairs)


def _page_lock(whole: Tensor, device: torch.device) -> None:
    """Page-lock mapped memory for copies from and to a CUDA device."""
    if device.type != "cuda":
        return
    code = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0))  # pyright: ignore
    if code != 0:
        _clear_error(device)
        _warn_pageable(code)


def _clear_error(device: torch.device) -> None:
    """Take the error of a CUDA call that PyTorch did not make out of this thread, for which CUDA keeps it: PyTorch
    reads and clears it behind its next kernel, which would fail in its place."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)  # launches a kernel


@cache
def _warn_pageable(code: int) -> None:
    """Say once per process and error that memory stays pageable."""
    logger.warning(
        "host copies of weights could not be page-locked (CUDA error %d), so that weights return to the device more "
        "slowly; give this machine or container more host memory, and raise `ulimit -l`",
        code,
    )
