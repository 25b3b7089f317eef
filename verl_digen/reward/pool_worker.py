# SPDX-License-Identifier: Apache-2.0
"""Process of one reward's pool: makes the reward once and scores batches of what is queued. No Ray.

| event | consequence |
| --- | --- |
| on several samples, `score` raises, returns no usable score, or takes `digen.reward.timeout_s` | each is tried alone |
| `score` raises `RewardUnavailable` on several samples | they are tried again together |
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
from typing import Any

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
        if len(batch) == 1:
            return [await self._attempts(batch[0], num_queued, 1 + self._max_retries)]
        try:
            scores = await self._call([sample for (sample,) in batch], num_queued)
        except RewardUnavailable as error:
            logger.warning("reward %s is not available for a batch of %d: %s", self._name, len(batch), error)
            together = [sample for (sample,) in batch]
            outcome = await self._attempts(together, num_queued, max(1, self._max_retries))
            if isinstance(outcome, Exception):
                return [outcome] * len(batch)
            return [[score] for score in outcome]
        except Exception as error:
            logger.warning("reward %s failed on a batch of %d, trying each alone: %r", self._name, len(batch), error)
            return [await self._attempts(samples, num_queued, max(1, self._max_retries)) for samples in batch]
        return [[score] for score in scores]

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
                return await self._call(samples, num_queued)
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

    async def _call(self, samples: Sequence[RewardInput], num_queued: int) -> list[PartScore]:
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
        read = [read_result(self._name, result) for result in results]
        counts = tuple(sorted(self._reward.take_counts().items()))
        made = RewardCall(self._name, started_s, time.time(), len(samples), num_queued, counts)
        return [PartScore(value, details, made) for value, details in read]

    async def _invoke(self, samples: Sequence[RewardInput]) -> Any:
        if inspect.iscoroutinefunction(self._reward.score):
            return await self._reward.score(samples)
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._reward.score, samples)
        return await found if inspect.isawaitable(found) else found
