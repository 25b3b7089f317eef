# SPDX-License-Identifier: Apache-2.0
"""Host copies that processes share: bytes held together, other weights, and processes that end."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.engine import harness  # noqa: F401 - its forkserver has imported PyTorch
from verl_digen.weights import host_copies as module
from verl_digen.weights.host_copies import SharedCopy, shared_copy

CPU = torch.device("cpu")


def weights(fill: int = 7) -> list[Tensor]:
    return [torch.full((size,), fill, dtype=torch.uint8) for size in (5, 1000, 64)]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"{os.getpid()}-{request.node.name}"


INSIDE = (1 + 1 + 16 + 1) * module.ALIGNMENT_BYTES
"""Bytes of the file that holds `weights`."""


def files(name: str) -> list[int]:
    """Bytes of each memory file of this name that a process has open; forks of one file count once."""
    found: dict[int, int] = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(link).startswith(f"/memfd:digen-{name}-"):
                status = os.stat(link)
                found[status.st_ino] = status.st_size
    return list(found.values())


def take(name: str, given: list[Tensor] | None = None) -> SharedCopy:
    found = shared_copy(name, given or weights(), device=CPU)
    assert found is not None
    return found


def _hold(name: str, answers: Connection) -> None:
    """Take the copy in another process, say who wrote it, and hold it until told to end."""
    found = take(name)
    answers.send((found.is_new, [part.tolist() for part in found.parts]))
    answers.recv()


class Other:
    """Another process that holds the copy."""

    def __init__(self, name: str):
        self._here, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("forkserver").Process(target=_hold, args=(name, there))
        self._process.start()
        self.is_new, self.parts = self._here.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture
def start() -> Iterator[Callable[[str], Other]]:
    """Start another process."""
    started: list[Other] = []

    def other(name: str) -> Other:
        started.append(Other(name))
        return started[-1]

    yield other
    for each in started:
        each.kill()


@pytest.mark.long
def test_processes_hold_equal_weights_once_and_the_copy_outlives_its_maker(
    name: str, start: Callable[[str], Other]
) -> None:
    first, second = start(name), start(name)
    assert (first.is_new, second.is_new) == (True, False)
    assert second.parts == [each.tolist() for each in weights()]
    first.kill()
    third = take(name)
    assert not third.is_new and files(name) == [INSIDE]
    second.kill()
    assert files(name) == [INSIDE], "this process maps it"
    del third
    assert files(name) == [] and take(name).is_new


def test_other_weights_of_this_name_are_not_taken_for_these(name: str) -> None:
    first = take(name)
    changed = weights()
    changed[1][999] += 1
    assert shared_copy(name, changed, device=CPU) is None
    assert not take(name).is_new and torch.equal(first.parts[1], weights()[1])
    assert take(name, weights()[:1]).is_new, "of another size"


def test_a_copy_that_was_not_completed_is_made_again(name: str) -> None:
    half = take(name)
    whole = module._find(f"digen-{name}-{INSIDE}")
    assert whole is not None
    whole[0] = 0
    again = take(name)
    assert again.is_new and files(name) == [INSIDE] * 2
    half.parts[0].fill_(1)
    assert torch.equal(again.parts[0], weights()[0])


def test_parts_are_aligned_and_do_not_overlap(name: str) -> None:
    given = [torch.full((size,), size, dtype=torch.uint8) for size in (3, 64, 65, 1)]
    found = take(name, given)
    assert all(map(torch.equal, found.parts, given))
    assert all(part.data_ptr() % module.ALIGNMENT_BYTES == 0 for part in found.parts)
    assert files(name) == [module.ALIGNMENT_BYTES * 6]


def test_a_copy_is_page_locked_by_its_maker_and_by_those_who_find_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []
    monkeypatch.setattr(module, "_page_lock", lambda whole, device: locked.append(whole.nbytes))
    held = take(name), take(name)
    assert [copy.is_new for copy in held] == [True, False] and locked == [INSIDE] * 2
    assert shared_copy(name, weights(8), device=CPU) is None and len(locked) == 2, "other weights are not this copy"


def test_a_lock_that_is_held_too_long_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_S", 0.0)
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    size = 2 * module.ALIGNMENT_BYTES
    with module._locked(f"digen-{name}-{size}"), pytest.raises(TimeoutError, match=f"'digen-{name}-{size}' must be"):
        take(name, [torch.zeros(1, dtype=torch.uint8)])
    assert take(name, [torch.zeros(1, dtype=torch.uint8)]).is_new


def test_a_lock_that_is_held_is_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = ExitStack()
    held.enter_context(module._locked(f"digen-{name}-{2 * module.ALIGNMENT_BYTES}"))
    monkeypatch.setattr(module.time, "sleep", lambda pause_s: held.close())
    assert take(name, [torch.zeros(1, dtype=torch.uint8)]).is_new


def test_a_lock_that_cannot_be_made_is_told_at_once(name: str) -> None:
    with pytest.raises(OSError, match="AF_UNIX path too long"), module._locked(name * 100):
        pass


class Cuda(TorchFunctionMode):
    """A CUDA device whose runtime refuses to page-lock, and keeps the error until PyTorch launches a kernel."""

    has_error = False

    def cudaHostRegister(self, *unused: Any) -> int:
        self.has_error = True
        return 2

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("device") != torch.device("cuda"):
            return function(*args, **(kwargs or {}))
        if self.has_error:
            self.has_error = False
            raise RuntimeError("CUDA error: out of memory")
        return function(*args, **{**kwargs, "device": "cpu"})


def test_a_memory_that_cannot_be_page_locked_is_told_once_and_breaks_no_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda, device = Cuda(), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    module._warn_pageable.cache_clear()
    with cuda:
        for _ in range(2):
            module._page_lock(torch.zeros(8, dtype=torch.uint8), device)
            assert torch.ones(2, device=device).sum() == 2
    assert caplog.text.count("could not be page-locked (CUDA error 2)") == 1
    assert caplog.text.count("raise `ulimit -l`") == 1
