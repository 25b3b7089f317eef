# SPDX-License-Identifier: Apache-2.0
"""Phases of a step of a colocated run with variance: all devices do one part of it, then the next. Pure.

*Dealt*, as verl does it: all samples are sent at once, each to the replica with the fewest in flight, so sample i is
generated on device i mod N whatever its speed. *From a queue*: a device takes the next sample when it is free.

Invariant (tests/simulate/test_variance.py): without variance the parts are those of `run_colocated`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from typing import NamedTuple

from verl_digen.simulate.profile import Numbers
from verl_digen.simulate.variance import Ranks, Variance

NUM_STEPS = 40
"""Steps of a colocated run with variance; each has its own draws."""


class Generated(NamedTuple):
    """Generation of a step's samples."""

    generate_s: float
    """Until the last sample is generated."""
    score_s: float
    """From then until the last one is scored."""
    busy_s: float
    """Seconds of a device at work, mean over the devices."""


@dataclass(frozen=True)
class Phases:
    """Phases of the steps of a run on `num_devices` devices, of which the first has the number `first_device`."""

    variance: Variance
    numbers: Numbers
    num_devices: int
    first_device: int = 0
    num_all_devices: int | None = None
    """All devices that the slow ones are drawn from; None: no other than these."""

    @cached_property
    def slow_factors(self) -> list[float]:
        """Slow factor of each device."""
        every = self.num_devices if self.num_all_devices is None else self.num_all_devices
        return self.variance.slow_factors(every)[self.first_device : self.first_device + self.num_devices]

    @cached_property
    def ranks(self) -> Ranks:
        """All devices, in calls."""
        return Ranks.of(self.variance, self.slow_factors)

    def first_group(self, step: int) -> int:
        """Number of a step's first group."""
        return step * self.numbers.num_prompts

    def generate(self, step: int, sample_s: float, *, has_queue: bool = False) -> Generated:
        """Generate and score the samples of a step.

        Args:
            sample_s: of one sample on a device that is not slow.
        """
        numbers, variance, slow = self.numbers, self.variance, self.slow_factors
        free_s = [0.0] * self.num_devices
        queue = [(0.0, device) for device in range(self.num_devices)]
        generated_s = scored_s = 0.0
        for index in range(numbers.num_prompts * numbers.group_size):
            group, sample = divmod(index, numbers.group_size)
            name = (self.first_group(step) + group, sample)
            device = queue[0][1] if has_queue else index % self.num_devices
            end_s = free_s[device] = free_s[device] + sample_s * slow[device] * variance.factor("generate", *name)
            if has_queue:
                heapreplace(queue, (end_s, device))
            generated_s = max(generated_s, end_s)
            scored_s = max(scored_s, end_s + numbers.score_s * variance.factor("score", *name))
        return Generated(generated_s, scored_s - generated_s, sum(free_s) / self.num_devices)

    def call_s(self, seconds: Callable[[float], float], kind: str, group: int) -> float:
        """Seconds of a call of all devices; `seconds` as for `Ranks.call_s`."""
        return self.ranks.call_s(seconds, kind, group)

    def shared_s(self, device_s: float, kind: str, group: int) -> float:
        """Seconds of work that is shared out by the speed of the devices.

        Args:
            device_s: seconds of one device that is not slow, for all of it.
        """
        return device_s / sum(1 / slow for slow in self.slow_factors) * self.variance.factor(kind, group)
