# SPDX-License-Identifier: Apache-2.0
"""Scores of one reward in its process: batches of what is queued, retries, timeout, turns on a device. No Ray.

| event | consequence |
| --- | --- |
| `score` raises on several samples, or takes `digen.reward.timeout_s` | each is tried again alone |
| it returns no usable score of a sample, or an exception | that sample is tried again alone |
| either is a `RewardUnavailable` | its samples are tried again together, and alone if one of them fails that |
| the same on one sample or group | tried again, 1 + `digen.reward.max_retries` times in all; then it fails |
| `sleep` of a timeshared reward | no further call starts; after the running one the device is freed |
| a sample comes while it is asleep | it waits |
| `wake` | the reward is made, or its weights come back to the device; then what is queued is scored |

A call starts when `max_batch_size` samples wait, or when none has arrived for `batch_wait_s`. Samples that arrive
during a call wait for the next one, so that calls grow with the load. A sync `score` that took too long keeps its
thread, and the next call gets a new one. `wake` and `sleep` are idempotent, so that the driver may repeat them to a
process that was restarted, which is asleep and holds nothing.

Invariants (tests/reward/test_scoring.py, test_timeshared.py): a sample that fails does not fail the others of its
batch; every sample gets its own score or an error, and never a zero for a failure; scores after a sleep are bitwise
those before. Asleep, the weights take no byte of the device.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any

from verl_digen.errors import call_users
from verl_digen.platforms.device_memory import allocated_bytes
from verl_digen.processes.bundles import given
from verl_digen.processes.calls import tell
from verl_digen.reward.base import Reward, RewardUnavailable
from verl_digen.types import PartScore, RewardCall, RewardInput

logger = logging.getLogger(__name__)


class ScoringError(RuntimeError):
    """A reward kept failing; the sample has no reward."""


@dataclass(frozen=True)
class DeviceMove:
    """A change of one process from asleep to awake, or back."""

    start_s: float
    end_s: float
    """Unix seconds of the process's clock."""
    held_bytes: int
    """Device memory of its tensors afterwards."""


class BatchScorer:
    """Queue of one reward, which `make` makes. At most `max_batch_size` samples per call of a reward of samples; None
    calls it for each sample at once. With `is_asleep` the first `wake` makes the reward."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Reward],
        max_retries: int,
        timeout_s: float,
        *,
        max_batch_size: int | None = None,
        batch_wait_s: float = 0.0,
        is_asleep: bool = False,
    ):
        self._name, self._make = name, make
        self._max_retries, self._timeout_s = max_retries, timeout_s
        self._max_batch_size, self._wait_s = max_batch_size, batch_wait_s
        self._pending: list[tuple[Sequence[RewardInput], asyncio.Future[list[PartScore]]]] = []
        self._arrived = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._calling = asyncio.Lock()
        """Held by a call."""
        self._thread = ThreadPoolExecutor(1)
        self._turning = asyncio.Lock()
        """Held by a change, so that two never run at once."""
        self._is_awake = asyncio.Event()
        """Not set while the reward is asleep, or about to be."""
        self._made: Reward | None = None
        if not is_asleep:
            self._made = make()
            self._is_awake.set()

    async def score(self, samples: Sequence[RewardInput]) -> list[PartScore]:
        """Score one sample, or all samples of a group, once the calls before are done -> a score per sample.
        ScoringError if the reward kept failing on it."""
        if self._max_batch_size is None:
            return await self._attempts(samples, 0, 1 + self._max_retries)
        if self._loop is None:
            self._loop = asyncio.create_task(self._run())
        answer: asyncio.Future[list[PartScore]] = asyncio.get_running_loop().create_future()
        self._pending.append((samples, answer))
        self._arrived.set()
        return await answer

    async def wake(self) -> DeviceMove | None:
        """Bring the weights to the device, and score what waits; None if it is awake already. Raises what making the
        reward raises, or `Reward.wake`."""
        async with self._turning:
            if self._is_awake.is_set():
                return None
            start_s = time.time()
            # in threads: the event loop must answer signs of life meanwhile
            if self._made is None:
                self._made = await asyncio.to_thread(self._make)
            else:
                await asyncio.to_thread(self._made.wake)
            self._is_awake.set()
            return DeviceMove(start_s, time.time(), allocated_bytes())

    async def sleep(self) -> DeviceMove | None:
        """Wait for the running call, then free the device memory; None if it is asleep already."""
        async with self._turning:
            if not self._is_awake.is_set():
                return None
            start_s = time.time()
            self._is_awake.clear()
            async with self._calling:
                await asyncio.to_thread(self._reward.sleep)
            return DeviceMove(start_s, time.time(), allocated_bytes())

    @property
    def _num_together(self) -> int:
        """Maximum entries of the queue in one call: samples, or one group."""
        is_of_groups = self._made is not None and self._made.scope == "group"
        return 1 if is_of_groups else self._max_batch_size or 1

    @property
    def _reward(self) -> Reward:
        assert self._made is not None
        return self._made

    async def _run(self) -> None:
        """Score what is queued, one call at a time."""
        while True:
            while not self._pending:
                self._arrived.clear()
                await self._arrived.wait()
            with suppress(asyncio.TimeoutError):
                while len(self._pending) < self._num_together:
                    self._arrived.clear()
                    await asyncio.wait_for(self._arrived.wait(), self._wait_s)
            while not self._is_awake.is_set():  # it may fall asleep again before this goes on
                await self._is_awake.wait()
            waiting = [entry for entry in self._pending if not entry[1].done()]  # the others were cancelled
            batch, self._pending = waiting[: self._num_together], waiting[self._num_together :]
            if not batch:
                continue
            outcomes: Sequence[list[PartScore] | Exception]
            try:
                async with self._calling:
                    outcomes = await self._score_batch([samples for samples, _ in batch], len(self._pending))
            except Exception as error:  # raised at every caller
                outcomes = [error] * len(batch)
            tell((answer for _, answer in batch), outcomes)

    async def _score_batch(
        self, batch: Sequence[Sequence[RewardInput]], num_queued: int
    ) -> list[list[PartScore] | Exception]:
        """Score single samples together, or one whole group."""
        if len(batch) == 1:
            return [await self._attempts(batch[0], num_queued, 1 + self._max_retries)]
        samples = [sample for (sample,) in batch]
        found: list[PartScore | Exception]
        try:
            found = await self._call(samples, num_queued)
        except Exception as error:
            found = [error] * len(samples)
        together = [number for number, one in enumerate(found) if isinstance(one, RewardUnavailable)]
        alone = [[number] for number, one in enumerate(found) if isinstance(one, Exception) and number not in together]
        left = [*alone, *filter(None, [together])]
        for numbers in left:
            error = found[numbers[0]]
            logger.warning("reward %s failed on %d of a batch, tried again: %r", self._name, len(numbers), error)
            again = [samples[number] for number in numbers]
            scores: Sequence[PartScore | Exception]
            try:
                scores = await self._attempts(again, num_queued, max(1, self._max_retries))
            except ScoringError as failure:
                if len(numbers) > 1 and not isinstance(failure.__cause__, RewardUnavailable):
                    left += [[number] for number in numbers]  # one of them failed it
                    continue
                scores = [failure] * len(numbers)
            for number, score in zip(numbers, scores, strict=True):
                found[number] = score
        return [one if isinstance(one, Exception) else [one] for one in found]

    async def _attempts(self, samples: Sequence[RewardInput], num_queued: int, num_attempts: int) -> list[PartScore]:
        """The scores of one call. ScoringError after `num_attempts`."""
        last: Exception | None = None
        for attempt in range(num_attempts):
            try:
                return [given(one) for one in await self._call(samples, num_queued)]
            except Exception as error:
                last = error
                is_last = attempt == num_attempts - 1
                logger.warning(
                    "reward %s failed (attempt %d of %d): %r",
                    *(self._name, attempt + 1, num_attempts, error),
                    exc_info=error if is_last else None,
                )
        raise ScoringError(
            f"reward {self._name!r} failed {num_attempts} times, last with {type(last).__name__}: {last}"
        ) from last

    async def _call(self, samples: Sequence[RewardInput], num_queued: int) -> list[PartScore | Exception]:
        """A score, or why there is none, per sample."""
        call = call_users(self._reward.score, samples, executor=self._thread)
        started_s, invoked = time.time(), asyncio.ensure_future(call)
        try:
            await asyncio.wait([invoked], timeout=self._timeout_s)
            if not invoked.done():
                self._thread = ThreadPoolExecutor(1)
                raise asyncio.TimeoutError(f"no answer within digen.reward.timeout_s={self._timeout_s}")
        finally:
            invoked.cancel()
        if invoked.cancelled():  # by itself: it may await a task that it has cancelled
            raise RuntimeError("its score was cancelled")
        results = invoked.result()
        count = len(results) if isinstance(results, Collection) else repr(results)[:200]
        if count != len(samples):
            raise ValueError(f"reward {self._name!r} must return one score per sample, got {count} for {len(samples)}")
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
        except Exception as error:  # float of what the user's reward returned
            return error


def read_result(name: str, result: Any) -> tuple[float, dict[str, float]]:
    """(score, numeric details) from a reward function's result."""
    named = result if isinstance(result, Mapping) else {"score": result}
    try:
        value = float(named["score"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        rule = f"reward {name!r} must return a number or a dict with 'score'"
        raise ValueError(f"{rule}, got {result!r}; return float(...)") from error
    details = {
        key: float(number)
        for key, number in named.items()
        if key != "score" and isinstance(number, Real) and not isinstance(number, bool)
    }
    if not math.isfinite(value):
        raise ValueError(f"reward {name!r} must return a finite number, got {value}")
    return value, details
