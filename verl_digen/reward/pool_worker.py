# SPDX-License-Identifier: Apache-2.0
"""Process of one reward's pool: makes the reward once and scores batches of what is queued. No Ray.

| event | consequence |
| --- | --- |
| `score` raises on several samples, or takes `digen.reward.timeout_s` | each is tried again alone |
| it returns no usable score of a sample, or an exception | that sample is tried again alone |
| either is a `RewardUnavailable` | its samples are tried again together |
| the same on one sample or group | tried again, 1 + `digen.reward.max_retries` times in all; then it fails |

A sync `score` that took too long keeps its thread, and the next call gets a new one.

Invariants (tests/reward/test_pool_worker.py): a sample that fails does not fail the others of its batch; every sample
gets its own score.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from verl_digen.reward.base import Reward, RewardUnavailable
from verl_digen.reward.queue import BatchQueue
from verl_digen.reward.scoring import ScoringError, read_result
from verl_digen.types import PartScore, RewardCall, RewardInput

logger = logging.getLogger(__name__)


class BatchScorer:
    """Calls one reward.

    Args:
        name: its name, for messages and metrics.
        max_batch_size: maximum samples per call of a reward of samples.
    """

    def __init__(
        self,
        name: str,
        reward: Reward,
        *,
        max_retries: int,
        timeout_s: float,
        max_batch_size: int,
        batch_wait_s: float,
    ):
        self._name, self._reward = name, reward
        self._max_retries, self._timeout_s = max_retries, timeout_s
        is_group = reward.scope == "group"
        self._queue = BatchQueue(
            self._score_groups if is_group else self._score_samples,
            max_batch_size=1 if is_group else max_batch_size,
            wait_s=batch_wait_s,
        )
        self._thread = ThreadPoolExecutor(1)

    async def score(self, samples: Sequence[RewardInput]) -> list[PartScore]:
        """Score one sample, or all samples of a group, once the calls before are done -> a score per sample.

        Raises:
            ScoringError: the reward kept failing on it.
        """
        return await self._queue.submit(tuple(samples))

    async def pause(self) -> None:
        """Start no further call, and return when the one that runs has ended, its retries included."""
        await self._queue.pause()

    def resume(self) -> None:
        """Start calls again."""
        self._queue.resume()

    async def _score_samples(
        self, batch: Sequence[Sequence[RewardInput]], num_queued: int
    ) -> list[list[PartScore] | Exception]:
        """Score single samples together; each alone if that fails."""
        samples = [sample for (sample,) in batch]
        if len(samples) == 1:
            return [await self._attempts(samples, num_queued, 1 + self._max_retries)]
        found: dict[int, PartScore | Exception]
        try:
            found = dict(enumerate(await self._call(samples, num_queued)))
        except Exception as error:
            found = dict.fromkeys(range(len(samples)), error)
        failed = {number: one for number, one in found.items() if isinstance(one, Exception)}
        together = [number for number, error in failed.items() if isinstance(error, RewardUnavailable)]
        again = [[number] for number in failed if number not in together] + ([together] if together else [])
        for numbers in again:
            error = failed[numbers[0]]
            logger.warning("reward %s failed on %d of a batch, tried again: %r", self._name, len(numbers), error)
            outcome = await self._attempts(
                [samples[number] for number in numbers], num_queued, max(1, self._max_retries)
            )
            scores = [outcome] * len(numbers) if isinstance(outcome, Exception) else outcome
            found.update(zip(numbers, scores, strict=True))
        return [one if isinstance(one, Exception) else [one] for one in found.values()]

    async def _score_groups(
        self, batch: Sequence[Sequence[RewardInput]], num_queued: int
    ) -> list[list[PartScore] | Exception]:
        """Score one whole group."""
        (group,) = batch
        return [await self._attempts(group, num_queued, 1 + self._max_retries)]

    async def _attempts(
        self, samples: Sequence[RewardInput], num_queued: int, num_attempts: int
    ) -> list[PartScore] | Exception:
        """The scores of one call, or the error after `num_attempts`."""
        last: Exception | None = None
        for attempt in range(num_attempts):
            try:
                scores = await self._call(samples, num_queued)
                for one in scores:
                    if isinstance(one, Exception):
                        raise one
                return cast("list[PartScore]", scores)
            except Exception as error:
                last = error
                is_last = attempt == num_attempts - 1
                logger.warning(
                    "reward %s failed (attempt %d of %d): %r",
                    *(self._name, attempt + 1, num_attempts, error),
                    exc_info=error if is_last else None,
                )
        failure = ScoringError(
            f"reward {self._name!r} failed {num_attempts} times, last with "
            f"{type(last).__name__}: {str(last) or f'no answer within digen.reward.timeout_s={self._timeout_s}'}"
        )
        failure.__cause__ = last
        return failure

    async def _call(self, samples: Sequence[RewardInput], num_queued: int) -> list[PartScore | Exception]:
        """A score, or why there is none, per sample."""
        started_s = time.time()
        try:
            results: Any = await asyncio.wait_for(self._invoke(samples), self._timeout_s)
        except asyncio.TimeoutError:
            self._thread = ThreadPoolExecutor(1)
            raise
        if len(results) != len(samples):
            raise ValueError(
                f"reward {self._name!r} must return one score per sample, got {len(results)} for {len(samples)} samples"
            )
        read = [self._read(result) for result in results]
        failed = [one for one in read if isinstance(one, Exception)]
        if len(failed) == len(read):
            return [*failed]  # the counts go with the next score
        counts = tuple(sorted(self._reward.take_counts().items()))
        made = RewardCall(self._name, started_s, time.time(), len(samples), num_queued, counts)
        return [one if isinstance(one, Exception) else PartScore(*one, made) for one in read]

    def _read(self, result: Any) -> tuple[float, dict[str, float]] | Exception:
        try:
            return result if isinstance(result, Exception) else read_result(self._name, result)
        except (ValueError, TypeError) as error:
            return error

    async def _invoke(self, samples: Sequence[RewardInput]) -> Any:
        if inspect.iscoroutinefunction(self._reward.score):
            return await self._reward.score(samples)
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._reward.score, samples)
        return await found if inspect.isawaitable(found) else found
