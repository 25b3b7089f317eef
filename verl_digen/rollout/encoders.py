# SPDX-License-Identifier: Apache-2.0
"""The text encoders of a process that generates, where they wait (`digen.rollout.encoders`), and the cache of prompt
conditions: each prompt is encoded once and kept on the host while there is room. A prompt that an encoder refuses fails
only the samples that use it, not the rest of the batch.

On the device they stay while the process is awake, beside the transformer. On the host they take the transformer's
place on the device for the time of one encoding; the two are never there together. Both have page-locked copies in host
memory, made once for frozen weights, so a turn costs the copies to the device and of what trains the one to the host.
On a CPU, where both places are one, nothing moves. There are none where every prompt was encoded before the run
(`verl_digen.rollout.stored`). Conditions are bitwise the same either way.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from verl.plugin.platform import get_platform

from verl_digen.config import RolloutConfig
from verl_digen.config.rollout import AUTO
from verl_digen.inputs.images import PromptInputs
from verl_digen.models.base import DiffusionModel, PromptEncoder
from verl_digen.platforms import device_memory
from verl_digen.platforms.module_memory import DeviceMemory
from verl_digen.rollout.stored import StoredConditions
from verl_digen.types import Condition, SampleRequest, move_condition

logger = logging.getLogger(__name__)


Conditions = dict[PromptInputs, Condition | ValueError]
"""Prompt -> its condition, or the encoder's error for a prompt it refuses. On the CPU."""
LookUp = Callable[[Sequence[PromptInputs]], Conditions]
"""Prompts -> the conditions of these, at least."""


def conditions_of(known: Conditions, request: SampleRequest) -> list[Condition]:
    """The condition of the request's prompt, then with guidance the negative one's; raises what the encoder did."""
    found: list[Condition] = []
    for inputs in request.branches:
        condition = known[inputs]
        if isinstance(condition, ValueError):
            raise condition
        found.append(condition)
    return found


def conditions_by_place(
    look_up: LookUp, requests: Sequence[SampleRequest]
) -> tuple[dict[int, list[Condition]], dict[int, ValueError]]:
    """(place in `requests` -> `conditions_of` it, place -> the encoder's error for a request that it refuses)."""
    known = look_up([inputs for request in requests for inputs in request.branches])
    conditions: dict[int, list[Condition]] = {}
    refused: dict[int, ValueError] = {}
    for place, request in enumerate(requests):
        try:
            conditions[place] = conditions_of(known, request)
        except ValueError as error:
            refused[place] = error
    return conditions, refused


def carried(request: SampleRequest, conditions: Sequence[Condition]) -> dict[str, Any]:
    """The conditions among the arguments of the request's `Generation`; None where it wants none."""
    given = conditions if request.wants_condition else ()
    return {"condition": given[0] if given else None, "negative_condition": given[1] if len(given) > 1 else None}


class PromptCache:
    """LRU cache of at most `max_size` prompts before the encoder, which runs while `turn` is held. Thread-safe.
    Refusals are not kept. During a call it may exceed `max_size` by the call's prompts."""

    def __init__(
        self, encode: PromptEncoder, max_size: int, turn: Callable[[], AbstractContextManager[None]] = nullcontext
    ):
        self._encode, self._max_size, self._turn = encode, max_size, turn
        self._conditions: OrderedDict[PromptInputs, Condition] = OrderedDict()
        self._hits = self._misses = 0
        self._lock = threading.RLock()

    def lookup(self, prompts: Sequence[PromptInputs]) -> Conditions:
        """Prompt -> its condition, or the encoder's error for a prompt it refuses."""
        with self._lock:
            distinct = list(dict.fromkeys(prompts))
            missing = [prompt for prompt in distinct if prompt not in self._conditions]
            self._misses += len(missing)
            self._hits += len(prompts) - len(missing)
            encoded: Conditions = {}
            if missing:
                with self._turn():
                    encoded = self._encode_each(missing)
            found: Conditions = {}
            for prompt in distinct:
                condition = encoded[prompt] if prompt in encoded else self._conditions[prompt]
                found[prompt] = condition
                if not isinstance(condition, ValueError):
                    self._conditions[prompt] = condition
                    self._conditions.move_to_end(prompt)
            while len(self._conditions) > self._max_size:
                self._conditions.popitem(last=False)
            return found

    def find(self, prompts: Sequence[PromptInputs]) -> Conditions | None:
        """Prompt -> its condition; None if one would have to be encoded."""
        with self._lock:
            return self.lookup(prompts) if all(prompt in self._conditions for prompt in prompts) else None

    def prepare(self, prompts: Sequence[PromptInputs], others: Iterable[PromptInputs]) -> None:
        """Encode the missing `prompts`, and in the same turn as many `others` as fit."""
        with self._lock:
            if not all(prompt in self._conditions for prompt in prompts):
                distinct = dict.fromkeys([*others, *prompts])  # the last are kept longest
                self.lookup([*distinct][-self._max_size :])

    def stats(self) -> dict[str, int]:
        """Number of prompts found (`hits`), encoded (`misses`) and kept (`size`), and the maximum kept (`max_size`)."""
        return {"hits": self._hits, "misses": self._misses, "size": len(self._conditions), "max_size": self._max_size}

    def _encode_each(self, prompts: Sequence[PromptInputs]) -> Conditions:
        try:
            conditions = [move_condition(condition, "cpu") for condition in self._encode(prompts)]
            return dict(zip(prompts, conditions, strict=True))
        except ValueError as error:
            if len(prompts) == 1:
                return {prompts[0]: error}
        return {prompt: found for one in prompts for prompt, found in self._encode_each([one]).items()}


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
