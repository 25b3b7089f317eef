# SPDX-License-Identifier: Apache-2.0
"""Variance of a simulated run: jitter, slow devices, skew between ranks, failures; draws are a function of the seed.

    sample, score    seconds * slow * J             J, lognormal of mean 1: a draw for each sample, and for its score
    call of ranks    J * max over the ranks of      a draw of S for each rank and call: a training call, an assist or a
                     seconds(slow) * S              log-prob pass takes its slowest rank

A draw has the name of what it is for (the kind, the group's number in the run, the sample), so that runs with the same
seed have the same draws whichever pool does the work. Devices are numbered over all pools, the trainer's first, so that
the same ones are slow. Commits, publications and switches take the profile's time.

*Failures.* Each device fails at the same rate. A generator's replica dies alone: its samples go to others, and it is
started anew at the next publication, takes `replace_s`, and joins at the publication after that. A device that trains
stops the run, which goes on `restart_s` later from the last checkpoint; colocated, every device does. With a rate r of
stops, D seconds from one checkpoint to the next and R seconds for a restart, the expected seconds for D are

    (exp(r D) - 1) (1 / r + R)

Left out: failures during a restart, nodes whose devices fail together, hung devices, `digen.rollout.max_restarts`, and
the seconds to write a checkpoint.

Invariants (tests/simulate/test_variance.py): without any variance every factor is 1; draws have the stated mean and
deviation; the slowest of n ranks is drawn as the largest of n draws, and never gets faster with more ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from random import Random
from statistics import NormalDist, fmean
from typing import Literal

from verl_digen.require import require

Place = Literal["anywhere", "generator"]
"""Place of the slow devices. anywhere: drawn from all devices. generator: the same, except that on separate pools they
generate, as many of them as there are generators."""

NORMAL = NormalDist()
SECONDS_PER_H = 3600.0
ALMOST_ONE = 1 - 2**-53
"""Largest float below 1."""
NUM_QUANTILES = 512
"""Quantiles over which the mean of the slowest rank is taken."""
MAX_VARIATION = 10.0
MAX_SEGMENT = 50.0
"""Most stops expected between two checkpoints; with more of them a run does not get on in any time worth a number."""


@dataclass(frozen=True)
class SlowDevices:
    """Devices that compute more slowly than others, drawn from all devices of a run.

    Example:
        SlowDevices(1, 32).number(1000)   # 32: 31.25, rounded up
    """

    count: int
    of: int | None = None
    """`count` in every `of` devices, rounded up; None: `count` devices in all."""
    factor: float = 2.0
    """Their seconds over those of the others."""
    place: Place = "anywhere"

    def __post_init__(self) -> None:
        require(self.count >= 1, "--slow-devices must be >= 1 device", self.count, "leave it out for none")
        require(
            self.of is None or self.of >= self.count,
            "--slow-devices must be at most all devices, COUNT/OF with OF >= COUNT",
            f"{self.count}/{self.of}",
            "e.g. 1/32",
        )
        require(
            self.factor >= 1 and math.isfinite(self.factor),
            "the factor of --slow-devices must be >= 1, their seconds over those of the others",
            self.factor,
            "2 is half the speed",
        )

    def number(self, num_devices: int) -> int:
        """Number of slow devices among so many."""
        number = self.count if self.of is None else -(-num_devices * self.count // self.of)
        require(
            number <= num_devices, f"--slow-devices must be <= {num_devices}, all devices", number, "give fewer of them"
        )
        return number


@dataclass(frozen=True)
class Failures:
    """Failures of devices, and what they cost."""

    rate_per_h: float
    """Failures per device and hour."""
    replace_s: float = 300.0
    """Seconds to start a replica in place of a dead one."""
    restart_s: float = 600.0
    """Seconds from a stop of the run until it trains again."""
    save_freq: int = 30
    """Steps between two checkpoints, `trainer.save_freq`; the default is that of the recipes."""

    def __post_init__(self) -> None:
        for option, value in (
            ("--failures", self.rate_per_h),
            ("--replace-s", self.replace_s),
            ("--restart-s", self.restart_s),
        ):
            rule = f"{option} must be >= 0 and finite"
            require(
                value >= 0 and math.isfinite(value), rule, value, "2e-5 failures per hour, 300 s and 600 s are usual"
            )
        require(self.save_freq >= 1, "--save-freq must be >= 1 step", self.save_freq, "30 is that of the recipes")

    def stopped_step_s(self, step_s: float, num_devices: int, *, refill_s: float = 0.0) -> float:
        """Expected seconds of a step of a long run that any of these devices stops; the formula is in the module's
        docstring.

        Args:
            step_s: without stops.
            refill_s: seconds to generate again what was generated ahead of the checkpoint.
        """
        rate, segment_s = self.rate_per_h / SECONDS_PER_H * num_devices, self.save_freq * step_s
        if rate == 0:
            return step_s
        require(
            rate * segment_s <= MAX_SEGMENT,
            f"--failures must leave a run that gets on: at most {MAX_SEGMENT:g} stops expected between two "
            f"checkpoints, which are {segment_s:.0f} s apart",
            self.rate_per_h,
            "lower it, or lower --save-freq",
        )
        return math.expm1(rate * segment_s) * (1 / rate + self.restart_s + refill_s) / self.save_freq


@dataclass(frozen=True)
class Variance:
    """Variance of a run.

    Example:
        variance = Variance(jitter=0.1, seed=7)
        variance.factor("generate", 3, 1)   # the same number at every call, about 1
    """

    jitter: float = 0.0
    """Coefficient of variation of each generation, score and call: standard deviation over mean."""
    rank_skew: float = 0.0
    """Coefficient of variation of each rank of a call."""
    slow: SlowDevices | None = None
    failures: Failures | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for option, value in (("--jitter", self.jitter), ("--rank-skew", self.rank_skew)):
            require(
                0 <= value <= MAX_VARIATION,
                f"{option} must lie in [0, {MAX_VARIATION:g}], a standard deviation over its mean",
                value,
                "0.1 is 10 %",
            )

    @property
    def is_constant(self) -> bool:
        """True if, apart from failures, nothing is drawn from step to step."""
        return self.jitter == self.rank_skew == 0

    def uniform(self, *name: object) -> float:
        """The draw of this name, in (0, 1)."""
        text = " ".join(map(str, (self.seed, *name)))
        drawn = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
        return ((drawn >> 12) + 0.5) / 2**52

    def factor(self, *name: object) -> float:
        """The jitter of this name, J."""
        return lognormal(self.uniform(*name), self.jitter) if self.jitter else 1.0

    def slowest(self, num_ranks: int, *name: object) -> float:
        """The largest S of so many ranks in the call of this name."""
        return largest(self.uniform(*name, "skew"), num_ranks, self.rank_skew) if self.rank_skew else 1.0

    def mean_slowest(self, num_ranks: int) -> float:
        """Mean of `slowest` over calls."""
        if not self.rank_skew:
            return 1.0
        return mean_largest(num_ranks, self.rank_skew)

    def slow_factors(self, num_devices: int, *, is_separate: bool = False) -> list[float]:
        """Factor of the seconds of each of a run's devices.

        Args:
            is_separate: True: the last ones generate, and the others train.
        """
        factors = [1.0] * num_devices
        if self.slow is not None:
            number = self.slow.number(num_devices)
            drawn = Random(f"{self.seed} slow").sample(range(num_devices), number)
            if is_separate and self.slow.place == "generator":
                drawn = list(range(num_devices - number, num_devices))
            for device in drawn:
                factors[device] = self.slow.factor
        return factors

    def dies_after_s(self, device: int, life: int) -> float:
        """Seconds that the replica of `device` lives, in its `life`-th life; infinite without failures."""
        if self.failures is None or self.failures.rate_per_h == 0:
            return math.inf
        return -math.log(self.uniform("death", device, life)) / self.failures.rate_per_h * SECONDS_PER_H


@dataclass(frozen=True)
class Ranks:
    """Ranks that work in calls.

    Example:
        ranks = Ranks.of(Variance(), [1.0, 2.0, 1.0])
        ranks.call_s(lambda slow: 3.0 * slow, "train", 0)   # 6.0: two ranks wait for the slow one
    """

    variance: Variance
    counts: tuple[tuple[float, int], ...]
    """(slow factor, number of ranks that have it), ascending."""

    @staticmethod
    def of(variance: Variance, slow_factors: list[float]) -> Ranks:
        """Ranks on these devices."""
        return Ranks(variance, tuple(sorted(Counter(slow_factors).items())))

    def call_s(self, seconds: Callable[[float], float], *name: object) -> float:
        """Seconds of the call of this name.

        Args:
            seconds: slow factor of a rank -> seconds of its part, without variance.
        """
        variance = self.variance
        each = [seconds(slow) * variance.slowest(count, *name, slow) for slow, count in self.counts]
        return max(each) * variance.factor(*name)

    def expected_s(self, seconds: Callable[[float], float]) -> float:
        """Seconds of a call that its slowest kind of ranks takes on average."""
        return max(seconds(slow) * self.variance.mean_slowest(count) for slow, count in self.counts)


def lognormal(quantile: float, variation: float) -> float:
    """Quantile of the lognormal distribution of mean 1 with this coefficient of variation."""
    variance = math.log1p(variation**2)
    return math.exp(math.sqrt(variance) * NORMAL.inv_cdf(quantile) - variance / 2)


def largest(quantile: float, number: int, variation: float) -> float:
    """Quantile of the largest of `number` draws of `lognormal`."""
    return lognormal(min(ALMOST_ONE, quantile ** (1 / number)), variation)


@cache
def mean_largest(number: int, variation: float) -> float:
    """Mean of the largest of `number` draws of `lognormal`, over `NUM_QUANTILES` quantiles."""
    return fmean(largest((index + 0.5) / NUM_QUANTILES, number, variation) for index in range(NUM_QUANTILES))
