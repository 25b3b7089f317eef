# SPDX-License-Identifier: Apache-2.0
"""Modules that a reward holds, among its attributes and those of its helpers, and their leave from the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from verl.plugin.platform import get_platform

from verl_digen.platforms.module_memory import DeviceMemory

MAX_DEPTH = 3
"""Attributes of attributes that are looked at: a reward, its encoder, what that one is made of."""


def held_modules(owner: object) -> list[nn.Module]:
    """Modules among the attributes of an object, of its helpers and of theirs, each once. Lists and mappings are looked
    into."""
    found = {id(module): module for module in _modules(vars(owner), MAX_DEPTH)}
    return list(found.values())


def _modules(value: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, Mapping):
        for own in value.values():
            yield from _modules(own, depth)
    elif isinstance(value, list | tuple):
        for own in value:
            yield from _modules(own, depth)
    elif depth > 0 and not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from _modules(vars(value), depth - 1)


class HeldMemory:
    """Device memory of a reward's modules.

    Their weights do not change, so they are copied to the host once, at the first `release`, and kept there. On a CPU
    nothing moves: the copies would take as much memory as a release frees.
    """

    def __init__(self, modules: list[nn.Module], device: torch.device):
        self._memory = DeviceMemory(modules, device)
        self._moves = device.type != "cpu"

    def release(self) -> None:
        """Free the memory, once everything that was queued on the device is done."""
        if not self._moves:
            return
        platform = get_platform()
        platform.synchronize()
        self._memory.release()
        platform.synchronize()
        platform.empty_cache()

    def restore(self) -> None:
        """Allocate the memory again and fill it."""
        if self._moves:
            self._memory.restore()
            get_platform().synchronize()
