# SPDX-License-Identifier: Apache-2.0
"""LRU cache of prompt conditions: each prompt is encoded once and kept while there is room.

A prompt that the encoder refuses fails only the samples that use it, not the rest of the batch. Refusals are not kept.

Bound: at most `max_size` entries between calls, plus the current call's prompts during one. Thread-safe: concurrent
lookups are serialised.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from verl_digen.inputs import PromptInputs
from verl_digen.models.base import PromptEncoder
from verl_digen.types import Condition


class PromptCache:
    """See the module.

    Args:
        encode: prompts -> their conditions, see `verl_digen.models.base.DiffusionModel.load_encoder`.
        max_size: maximum number of prompts kept.
    """

    def __init__(self, encode: PromptEncoder, max_size: int):
        self._encode = encode
        self._max_size = max_size
        self._conditions: OrderedDict[PromptInputs, Condition] = OrderedDict()
        self._hits = self._misses = 0
        self._lock = threading.Lock()

    def lookup(self, prompts: Sequence[PromptInputs]) -> dict[PromptInputs, Condition | ValueError]:
        """Prompt -> its condition, or the encoder's error for a prompt it refuses."""
        with self._lock:
            return self._lookup(prompts)

    def _lookup(self, prompts: Sequence[PromptInputs]) -> dict[PromptInputs, Condition | ValueError]:
        distinct = list(dict.fromkeys(prompts))
        missing = [prompt for prompt in distinct if prompt not in self._conditions]
        self._misses += len(missing)
        self._hits += len(prompts) - len(missing)
        encoded = self._encode_each(missing) if missing else {}
        found: dict[PromptInputs, Condition | ValueError] = {}
        for prompt in distinct:
            condition = encoded[prompt] if prompt in encoded else self._conditions[prompt]
            found[prompt] = condition
            if not isinstance(condition, ValueError):
                self._conditions[prompt] = condition
                self._conditions.move_to_end(prompt)
        while len(self._conditions) > self._max_size:
            self._conditions.popitem(last=False)
        return found

    def stats(self) -> dict[str, int]:
        """Number of prompts found (`hits`), encoded (`misses`) and kept (`size`), and the maximum kept (`max_size`)."""
        return {"hits": self._hits, "misses": self._misses, "size": len(self._conditions), "max_size": self._max_size}

    def _encode_each(self, prompts: Sequence[PromptInputs]) -> dict[PromptInputs, Condition | ValueError]:
        try:
            return dict(zip(prompts, self._encode(prompts), strict=True))
        except ValueError as error:
            if len(prompts) == 1:
                return {prompts[0]: error}
        return {prompt: found for one in prompts for prompt, found in self._encode_each([one]).items()}
