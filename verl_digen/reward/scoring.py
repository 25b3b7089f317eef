# SPDX-License-Identifier: Apache-2.0
"""Scoring of one sample with several weighted reward functions: retries, timeout, no silent zero. No verl, no Ray.

Invariants (tests/reward/test_scoring.py): the reward is the weighted sum; a function that raises is called
1 + `max_retries` times and then the sample fails with its error; nan and inf are errors.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from verl_digen.reward.functions import RewardFunction, call
from verl_digen.types import RewardCall, Score

logger = logging.getLogger(__name__)


class ScoringError(RuntimeError):
    """A reward function kept failing; the sample has no reward."""


@dataclass(frozen=True)
class WeightedReward:
    """One reward function of the sum."""

    name: str
    function: RewardFunction
    weight: float


@dataclass(frozen=True)
class Scorer:
    """Calls every reward function on a sample."""

    rewards: tuple[WeightedReward, ...]
    max_retries: int
    timeout_s: float

    async def score(self, *, names: Collection[str] | None = None, **sample: Any) -> Score:
        """Score one sample; the other keyword arguments are those of a reward function.

        Args:
            names: the rewards to call; None: all.

        Raises:
            ScoringError: a reward function failed 1 + max_retries times.
        """
        rewards = [reward for reward in self.rewards if names is None or reward.name in names]
        results = await asyncio.gather(*[self._call(reward, sample) for reward in rewards])
        total = 0.0
        parts: dict[str, float] = {}
        for reward, (result, _) in zip(rewards, results, strict=True):
            value, details = read_result(reward.name, result)
            total += reward.weight * value
            parts[reward.name] = value
            parts |= {f"{reward.name}/{name}": detail for name, detail in details.items()}
        return Score(total=total, parts=parts, calls=tuple(made for _, made in results))

    async def _call(self, reward: WeightedReward, sample: Mapping[str, Any]) -> tuple[Any, RewardCall]:
        last: Exception | None = None
        for attempt in range(1 + self.max_retries):
            try:
                started_s = time.time()
                result = await asyncio.wait_for(call(reward.function, sample), self.timeout_s)
                read_result(reward.name, result)  # an unusable answer is a failure of this attempt
                return result, RewardCall(reward.name, started_s, time.time(), num_samples=1, num_queued=0)
            except Exception as error:
                last = error
                is_last = attempt == self.max_retries
                logger.warning(
                    "reward %s failed (attempt %d of %d): %r",
                    reward.name,
                    attempt + 1,
                    1 + self.max_retries,
                    error,
                    exc_info=error if is_last else None,
                )
        raise ScoringError(
            f"reward function {reward.name!r} failed {1 + self.max_retries} times, last with "
            f"{type(last).__name__}: {str(last) or f'no answer within digen.reward.timeout_s={self.timeout_s}'}"
        ) from last


def read_result(name: str, result: Any) -> tuple[float, dict[str, float]]:
    """(score, numeric details) from a reward function's result."""
    details: dict[str, float] = {}
    score = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(
                f"reward function {name!r} must return a number or a dict with 'score', got {dict(result)!r}"
            )
        score = result["score"]
        details = {
            key: float(value)
            for key, value in result.items()
            if key != "score" and isinstance(value, Real) and not isinstance(value, bool)
        }
    value = float(score)
    if not math.isfinite(value):
        raise ValueError(f"reward function {name!r} must return a finite number, got {value}")
    return value, details
