# SPDX-License-Identifier: Apache-2.0
"""LRU cache of prompt conditions: each prompt is encoded once and kept on the host while there is room. Thread-safe.

A prompt that the encoder refuses fails only the samples that use it, not the rest of the batch. Refusals are not kept.
During a call the cache may exceed `max_size` by the call's prompts.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from verl_digen.inputs.images import PromptInputs
from verl_digen.models.base import PromptEncoder
from verl_digen.types import Condition, SampleRequest, move_condition

Conditions = dict[PromptInputs, Condition | ValueError]
"""Prompt -> its condition, or the encoder's error for a prompt it refuses. On the CPU."""


class Prompts(Protocol):
    """A source of conditions."""

    def lookup(self, prompts: Sequence[PromptInputs]) -> Conditions:
        """Conditions of `prompts`."""
        ...


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
    prompts: Prompts, requests: Sequence[SampleRequest]
) -> tuple[dict[int, list[Condition]], dict[int, ValueError]]:
    """(place in `requests` -> `conditions_of` it, place -> the encoder's error for a request that it refuses)."""
    known = prompts.lookup([inputs for request in requests for inputs in request.branches])
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
    """Cache of at most `max_size` prompts before the encoder, which runs while `turn` is held."""

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
