# SPDX-License-Identifier: Apache-2.0
"""The server of ranks that generate, see `verl_digen.trainer.generating`. It starts before them, because the handles of
ranks need verl, whose import takes seconds."""

import asyncio
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from ray.exceptions import RayActorError

from verl_digen.errors import describe
from verl_digen.inputs.images import PromptInputs
from verl_digen.processes.relays import Together, Work
from verl_digen.rollout.batcher import Answers, BatchingServer
from verl_digen.types import SampleRequest


class TrainerServer(BatchingServer):
    """Collects requests into batches of at most `max_batch_size` samples, on all ranks together."""

    def __init__(self, *, max_batch_size: int, wait_s: float):
        super().__init__(max_batch_size=max_batch_size, wait_s=wait_s)
        importlib.import_module("verl")
        self._ranks, self._device = Together([]), None  # until `connect`
        self._version: int | None = None
        self._announced: set[PromptInputs] = set()
        """Prompts that the ranks have heard of since the last weights."""
        self._prompt_cache = {"hits": 0, "misses": 0}
        self._batcher.pause()

    async def _generate_batch(self, requests: Sequence[SampleRequest], should_stop: Callable[[], bool]) -> Answers:
        own = {inputs for request in requests for inputs in request.branches}
        waiting = dict.fromkeys(inputs for request in self._batcher.waiting for inputs in request.branches)
        coming = tuple(inputs for inputs in waiting if inputs not in own | self._announced)
        self._announced |= own | {*coming}
        try:
            drawn = await self._ranks.call(Work("draw", (tuple(requests), coming, self._version)), "all")
        except RayActorError as error:  # no replica: the sample cannot go to another one
            raise RuntimeError(f"a rank of the trainer was lost while it generated: {describe(error)}") from error
        answers = {place: answer for of_rank, _ in drawn for place, answer in of_rank}
        facts = [fact for _, fact in drawn]
        self._prompt_cache = facts[0]["prompt_cache"]
        if (fitted := facts[0]["fitted"]) is not None:
            self._batcher.max_batch_size = fitted
        outcomes: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        outcomes.set_result([answers[place] for place in range(len(requests))])
        return outcomes

    async def connect(self, ranks: Together, device: str | None) -> None:
        """Take all ranks, and their accelerator, None on a CPU."""
        self._ranks, self._device = ranks, device

    async def activate(self, version: int) -> None:
        """Generate with the ranks' weights from now on, as `version`. Idempotent."""
        async with self._batcher.exclusive():
            self._version = version
            self._announced.clear()
        self._batcher.resume()

    async def sleep(self) -> None:
        """Start no batch until `activate`, and end the running one; the ranks free what only generation needs."""
        self._batcher.pause()
        async with self._batcher.exclusive():
            await self._ranks.call(Work("rest"), "first")

    async def wake_up(self) -> None:
        """No-op: `activate` does it."""

    async def check_health(self) -> dict[str, Any]:
        """State of this replica; see `verl_digen.trainer.replicas.Replicas.metrics`."""
        return {
            "version": self._version,
            "received_version": self._version,
            "prompt_cache": self._prompt_cache,
            "last_update": {},
            "device": self._device,
        }
