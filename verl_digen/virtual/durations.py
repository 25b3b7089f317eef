# SPDX-License-Identifier: Apache-2.0
"""How long virtual devices take: a profile's numbers, by the simulator's formulas, scaled. Pure.

- The run's own P, G, T and K count, not the profile's: what is asked for is what takes time.
- `digen simulate` and a virtual run share the formulas (`verl_digen.simulate.costs`), so what differs between the
  two is what the live system adds.

Invariants (tests/bench/test_durations.py): a chunk, a fragment and a step take what the simulator says, times
`time_scale`; the samples of a chunk are ready together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from verl_digen.config import DigenConfig
from verl_digen.devices import known_device, slowdown
from verl_digen.engine.fragment import FragmentSample
from verl_digen.require import require
from verl_digen.simulate.costs import assist_s, sample_s, train_s
from verl_digen.simulate.profile import Profile, load_profile, profile_names


@dataclass(frozen=True)
class VirtualDurations:
    """Args:
    profile: with the run's own batch.
    num_ranks: devices of the trainer.
    trainer_slowdown, generator_slowdown: what the profile's seconds of compute are multiplied with there.
    """

    profile: Profile
    time_scale: float
    num_ranks: int
    has_tsp: bool
    trainer_slowdown: float
    generator_slowdown: float

    @property
    def sample_s(self) -> float:
        """A replica generates one sample."""
        return self.time_scale * sample_s(self.profile.numbers, self.generator_slowdown)

    @property
    def score_s(self) -> float:
        """From a chunk's pixels to its scores."""
        return self.time_scale * self.profile.numbers.score_s

    @property
    def commit_s(self) -> float:
        """Optimizer step and publication."""
        return self.time_scale * self.profile.numbers.commit_s

    def assist_s(self, num_samples: int) -> float:
        """The trainer's ranks generate a chunk."""
        return self.time_scale * assist_s(self.profile.numbers, num_samples, self.num_ranks, self.trainer_slowdown)

    def train_s(self, samples: Sequence[FragmentSample]) -> float:
        """The trainer's ranks train a fragment."""
        num_groups = len({sample.uid for sample in samples})
        num_rows = sum(sample.num_steps for sample in samples)
        numbers = replace(
            self.profile.numbers,
            group_size=-(-len(samples) // num_groups),
            num_trained_steps=-(-num_rows // len(samples)),
        )
        seconds = train_s(numbers, num_groups, self.num_ranks, slowdown=self.trainer_slowdown, has_tsp=self.has_tsp)
        return self.time_scale * seconds


def virtual_durations(digen: DigenConfig) -> VirtualDurations:
    """The durations of a run's virtual devices.

    Raises:
        ValueError: no profile is named, or there is none of that name; an unknown type of device.
    """
    virtual = digen.virtual
    require(
        virtual.profile is not None,
        "digen.virtual.profile must name a profile with trainer.v1.trainer_mode=digen_virtual",
        virtual.profile,
        "set e.g. digen.virtual.profile=wan2.1-14b",
    )
    assert virtual.profile is not None
    require(
        virtual.profile in profile_names() or Path(virtual.profile).is_file(),
        f"digen.virtual.profile must be a file or one of {', '.join(profile_names())}",
        virtual.profile,
        "choose one of these, or give the path of a profile's JSON",
    )
    profile = load_profile(virtual.profile)
    numbers = replace(profile.numbers, num_steps=digen.sampling.num_steps)

    def slowdown_of(key: str, device: str | None) -> float:
        return 1.0 if device is None else slowdown(known_device(f"digen.virtual.{key}", device), profile.device)

    return VirtualDurations(
        replace(profile, numbers=numbers),
        virtual.time_scale,
        virtual.trainer_ranks,
        digen.tsp.enable,
        trainer_slowdown=slowdown_of("trainer_device", virtual.trainer_device),
        generator_slowdown=slowdown_of("generator_device", virtual.generator_device),
    )


@dataclass
class Busy:
    """Samples of one group that a virtual replica denoises together."""

    uid: str
    ends_s: float
    is_stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Nobody wants it any more."""


class ReplicaClock:
    """What one virtual replica is busy with: requests of one group that come while it works on that group join in,
    others queue behind.

    Example, 2 s per sample:
        clock = ReplicaClock(sample_s=2.0)
        first = clock.join("p0", now_s=0.0)    # Busy("p0", ends_s=2.0)
        clock.join("p0", now_s=0.0) is first   # True: Busy("p0", ends_s=4.0)
        clock.join("p1", now_s=1.0)            # Busy("p1", ends_s=6.0)
    """

    def __init__(self, sample_s: float):
        self._sample_s = sample_s
        self._last: Busy | None = None

    def join(self, uid: str, now_s: float) -> Busy:
        """A request arrives -> its batch, whose end moves as more join."""
        last = self._last
        if last is None or last.ends_s <= now_s:
            self._last = Busy(uid, now_s + self._sample_s)
        elif last.uid == uid:
            last.ends_s += self._sample_s
        else:
            self._last = Busy(uid, last.ends_s + self._sample_s)
        assert self._last is not None
        return self._last

    def stop(self, uid: str, now_s: float) -> None:
        """Nobody wants the group's samples any more: what the replica is busy with, if it is theirs, ends now."""
        last = self._last
        if last is not None and last.uid == uid and last.ends_s > now_s:
            last.ends_s = now_s
            last.is_stopped.set()
