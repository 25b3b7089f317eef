# SPDX-License-Identifier: Apache-2.0
"""The trainer's ranks, as one: every call goes to all of them, with names and numbers only.

A call is one message per rank, or with many ranks one per relay (`verl_digen.processes.relays`). Fragments and
requests, which grow with the groups, are put into Ray's object store once, and each message holds a reference: the
driver serialises a fragment once, whatever the number of ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from typing import Any

import ray

from verl_digen.agent_loop.chunks import describe
from verl_digen.algorithms.metric import Metric, from_plain
from verl_digen.engine.fragment import FragmentSample, FragmentSpec
from verl_digen.processes.relays import Together, Work
from verl_digen.store.keys import TRAIN
from verl_digen.types import SampleRequest

logger = logging.getLogger(__name__)


class TrainerRanks:
    """Calls of `DiffusionWorker` on every rank; an exception of any rank is raised.

    Args:
        ranks: all ranks, see `verl_digen.processes.relays.ranks_of`.
        put: stores a value once for all ranks -> what each of them is sent in its place.
    """

    def __init__(self, ranks: Together, put: Callable[[Any], Any] = ray.put):
        self._ranks, self._put = ranks, put
        self.compute_s = 0.0
        """Seconds spent in training calls since it was set to 0."""

    async def begin(self, num_samples: int, num_rows: int, scale: float | None = None) -> None:
        """Open a logical batch, see `DiffusersFSDPEngine.begin`."""
        await self._on_all("begin", num_samples, num_rows, TRAIN, scale)

    async def accumulate(self, fragment: FragmentSpec) -> None:
        """Add the gradient of complete groups."""
        counts = await self._on_all("accumulate", self._put(fragment))
        self.compute_s += counts["accumulate_s"]

    async def evaluate(self, fragments: Sequence[FragmentSpec]) -> list[FragmentSpec]:
        """Copies of the fragments with the log-probs of their rows under the current weights.

        Raises:
            RuntimeError: no rank evaluated one of the rows.
        """
        started_s = time.perf_counter()
        found: dict[str, dict[int, float]] = {}
        for part in await self._ranks.call(Work("evaluate", (self._put(fragments), TRAIN)), "all"):
            for key, log_probs in part.items():
                found.setdefault(key, {}).update(log_probs)
        self.compute_s += time.perf_counter() - started_s
        return [
            replace(fragment, samples=tuple(_with_log_probs(sample, found) for sample in fragment.samples))
            for fragment in fragments
        ]

    async def keep_old(self) -> None:
        """Have every rank copy the weights as policy `old` of the optimizer steps that follow."""
        await self._on_all("keep_old")

    async def assist(self, requests: Sequence[SampleRequest], version: int) -> list[list[tuple[str, Any]]]:
        """Have the ranks generate -> of each rank: (uid, reference to its samples of the group). See
        `DiffusionWorker.assist`."""
        return await self._ranks.call(Work("assist", (self._put(tuple(requests)), version)), "all")

    async def commit(self, *, more: bool = False) -> dict[str, Metric]:
        """Take the optimizer step; returns its metrics. See `DiffusersFSDPEngine.commit`."""
        started_s = time.perf_counter()
        metrics = await self._on_all("commit", more)
        self.compute_s += time.perf_counter() - started_s
        return from_plain(metrics)

    async def abort(self) -> None:
        """Have every rank discard the open batch. Logs their exceptions: another one is about to end the run."""
        outcomes = await self._ranks.call(Work("abort"), "outcomes")
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                logger.error("rank %d of the trainer could not forget the open batch: %s", rank, describe(outcome))

    async def _on_all(self, method: str, *args: Any) -> Any:
        """Wait for every rank; return the first one's answer."""
        (answer,) = await self._ranks.call(Work(method, args), "first")
        return answer


def _with_log_probs(sample: FragmentSample, found: dict[str, dict[int, float]]) -> FragmentSample:
    log_probs = found.get(sample.key, {})
    if sorted(log_probs) != list(sample.points):
        raise RuntimeError(
            f"sample {sample.key} has {sample.num_rows} trained steps, but the trainer's ranks evaluated "
            f"{sorted(log_probs)}; every row must be evaluated by one of them"
        )
    return replace(sample, old_log_probs=tuple(log_probs.get(step, nan) for step in range(sample.facts.num_steps)))
