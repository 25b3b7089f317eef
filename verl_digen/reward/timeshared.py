# SPDX-License-Identifier: Apache-2.0
"""Process of a reward that takes turns with the replicas on a device: asleep, or awake and scoring. No Ray.

| event | consequence |
| --- | --- |
| start, or restart after a crash | it is asleep and holds nothing: the first `wake` makes the reward |
| a sample comes while it is asleep | it waits in the queue |
| `wake` | the weights come to the device, then what is queued is scored |
| `sleep` | no further call starts; once the running one has ended, the weights leave the device |

`wake` and `sleep` are idempotent, so that the driver may repeat them to a process that was restarted.

Invariants (tests/reward/test_timeshared.py): no call runs while it is asleep; scores after a sleep are bitwise those
before; asleep, the weights take no byte of the device.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_digen.platforms.device_memory import allocated_bytes
from verl_digen.reward.base import Reward
from verl_digen.reward.pool_worker import BatchScorer
from verl_digen.types import PartScore, RewardInput


@dataclass(frozen=True)
class Turn:
    """A change of one process from asleep to awake, or back."""

    start_s: float
    end_s: float
    """Unix seconds of the process's clock."""
    held_bytes: int
    """Device memory of its tensors afterwards."""


class TimesharedScorer:
    """See the module.

    Args:
        make: makes the reward, on its device.
        scorer_of: makes the reward's queue.
    """

    def __init__(self, make: Callable[[], Reward], scorer_of: Callable[[Reward], BatchScorer]):
        self._make, self._scorer_of = make, scorer_of
        self._reward: Reward | None = None
        self._scorer: BatchScorer | None = None
        self._is_made = asyncio.Event()
        self._is_awake = False
        self._turning = asyncio.Lock()
        """Held by a change, so that two never run at once."""

    async def score(self, samples: Sequence[RewardInput]) -> list[PartScore]:
        """Score one sample, or all samples of a group, once the reward is awake.

        Raises:
            ScoringError: the reward kept failing on it.
        """
        await self._is_made.wait()
        assert self._scorer is not None
        return await self._scorer.score(samples)

    async def wake(self) -> Turn | None:
        """Bring the weights to the device, and score what waits; None if it is awake already.

        Raises: what making the reward raises, or `Reward.wake`.
        """
        async with self._turning:
            if self._is_awake:
                return None
            start_s = time.time()
            # in threads: the event loop must answer signs of life meanwhile
            if self._reward is None:
                self._reward = await asyncio.to_thread(self._make)
                self._scorer = self._scorer_of(self._reward)
                self._is_made.set()
            else:
                assert self._scorer is not None
                await asyncio.to_thread(self._reward.wake)
                self._scorer.resume()
            self._is_awake = True
            return Turn(start_s, time.time(), allocated_bytes())

    async def sleep(self) -> Turn | None:
        """Wait for the running call, then free the device memory; None if it is asleep already.

        Raises: what `Reward.sleep` raises.
        """
        async with self._turning:
            if not self._is_awake:
                return None
            assert self._reward is not None and self._scorer is not None
            start_s = time.time()
            await self._scorer.pause()
            await asyncio.to_thread(self._reward.sleep)
            self._is_awake = False
            return Turn(start_s, time.time(), allocated_bytes())
