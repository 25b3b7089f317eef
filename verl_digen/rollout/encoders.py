# SPDX-License-Identifier: Apache-2.0
"""The text encoders of a process that generates, and where they wait: `digen.rollout.encoders`.

On the device they stay while the process is awake, beside the transformer. On the host they take the transformer's
place on the device for the time of one encoding; the two are never there together. Both have page-locked copies in host
memory, made once for frozen weights, so a turn costs the copies to the device and of what trains the one to the host.
On a CPU, where both places are one, nothing moves. There are none where every prompt was encoded before the run
(`verl_digen.rollout.stored`). Conditions are bitwise the same either way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from verl.plugin.platform import get_platform

from verl_digen.config import RolloutConfig
from verl_digen.config.rollout import AUTO
from verl_digen.models.base import DiffusionModel
from verl_digen.platforms import device_memory
from verl_digen.platforms.module_memory import DeviceMemory
from verl_digen.rollout.prompt_cache import PromptCache
from verl_digen.rollout.stored import StoredConditions

logger = logging.getLogger(__name__)


class Movable(Protocol):
    """Memory of a device that may be given away for a time."""

    def release(self, *, changed: Callable[[], Iterable[Tensor]]) -> object:
        """Free it; `changed` returns the tensors whose copies on the host are stale."""
        ...

    def restore(self) -> None:
        """Allocate and fill it again."""
        ...


class Encoders:
    """Encoders of a model, made before the transformer is loaded. `dtype`: of the network. `share_as`: name under which
    processes of this node share host copies, see `DeviceMemory`."""

    def __init__(
        self,
        model: DiffusionModel,
        dtype: torch.dtype,
        device: torch.device,
        settings: RolloutConfig,
        share_as: str | None = None,
    ):
        if settings.encoders == "before":
            self.encode = StoredConditions(settings.conditions_dir, model, dtype).encoder()
        else:
            self.encode = model.load_encoder(dtype, device)
        self._memory = DeviceMemory(self.encode.modules, device, share_as and f"{share_as}-encoders")
        size, total, is_accelerated = self._memory.num_bytes, None, device.type != "cpu"
        if is_accelerated and settings.encoders == AUTO:
            size += sum(parameter.nbytes for parameter in model.load_structure(dtype).parameters())
            total = device_memory.limit_bytes()
        self.wait_on_host = is_accelerated and settings.hosts_encoders(size, total)
        """True if they are on the device for an encoding alone."""
        self.prompts = PromptCache(self.encode, settings.embed_cache_size, turn=self._turn)
        self._others: Movable | None = None
        self._changed: Callable[[], Iterable[Tensor]] = tuple
        if self.wait_on_host:
            logger.info("text encoders wait in host memory while the transformer runs")
            self._memory.release()

    def alternate_with(self, others: Movable, changed: Callable[[], Iterable[Tensor]] = tuple) -> None:
        """Give the device of `others`, the transformer's and the decoders' memory, to encoders that wait on the host,
        for each encoding. `changed` returns the tensors among them that train."""
        self._others, self._changed = others, changed

    def sleep(self) -> None:
        """Free their device memory."""
        self._memory.release()

    def wake(self) -> None:
        """Allocate it again, unless they wait on the host."""
        if not self.wait_on_host:
            self._memory.restore()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the encoders on the device. Called in the thread that generates, if they wait on the host."""
        if not self.wait_on_host:
            yield
            return
        assert self._others is not None
        self._exchange(self._others, self._memory)
        try:
            yield
        finally:
            self._exchange(self._memory, self._others)

    def _exchange(self, leaving: Movable, coming: Movable) -> None:
        leaving.release(changed=self._changed if leaving is self._others else tuple)
        get_platform().synchronize()  # the copies to the host, before the memory has other numbers
        device_memory.release_cached()
        coming.restore()
