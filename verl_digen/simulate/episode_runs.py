# SPDX-License-Identifier: Apache-2.0
"""Runs of episodes on a cluster: a sample is an episode of several turns, with an environment between them.

    device-seconds of an episode = turns * (T * step_s + decode_s)          rows of an episode = turns * K

so everything that counts device-seconds and rows takes `Episodes.profile_of(profile)`, in which a sample costs as much
as an episode. What waits does not show there: `Episodes.slots` and `Episodes.batch` play it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from verl_digen.require import require
from verl_digen.simulate.costs import sample_s
from verl_digen.simulate.episodes import EpisodeBatch, EpisodeReplicas, EpisodeSlots, Latency, LatencyOf
from verl_digen.simulate.profile import Profile

REDUNDANT = "+redundant"
"""End of the name of a run that begins more episodes, or groups, than it needs."""
MAX_TURNS = 1000
"""Maximum of `--turns`, that of `digen.environment.max_turns`."""
MAX_SLOTS = 10_000
"""Maximum slots of a replica. Catches typos."""


@dataclass(frozen=True)
class Episodes:
    """Settings of a run's episodes."""

    num_turns: int
    """Turns of every episode."""
    latency: Latency = field(default_factory=Latency)
    slots_per_replica: int = 1
    """`digen.gap.slots_per_replica`: episodes that a replica, here a device, has at the same time; with
    `digen.gap.chunk_size=1`. Where pools take turns, all episodes of a batch run at the same time."""
    extra_episodes: int = 0
    """`digen.environment.extra_episodes`, where pools take turns."""
    extra_prompts: int = 0
    """`digen.queue.extra_prompts`, on separate pools."""
    seed: int = 0

    def __post_init__(self) -> None:
        for option, value, least, most in (
            ("--turns", self.num_turns, 1, MAX_TURNS),
            ("--slots-per-replica", self.slots_per_replica, 1, MAX_SLOTS),
            ("--extra-episodes", self.extra_episodes, 0, MAX_SLOTS),
            ("--extra-prompts", self.extra_prompts, 0, MAX_SLOTS),
        ):
            require(least <= value <= most, f"{option} must lie in [{least}, {most}]", value, "give such a number")

    def check(self, techniques: Collection[str]) -> None:
        """Require techniques that runs of episodes can have."""
        require(
            "tag" not in techniques,
            "--techniques must be without tag with --turns",
            ",".join(techniques),
            "leave it out: trainer ranks generate without an agent loop",
        )

    def profile_of(self, profile: Profile) -> Profile:
        """The profile with episodes as its samples: their device-seconds and rows."""
        numbers = profile.numbers
        return replace(
            profile,
            numbers=replace(
                numbers,
                num_steps=numbers.num_steps * self.num_turns,
                decode_s=numbers.decode_s * self.num_turns,
                num_trained_steps=numbers.num_trained_steps * self.num_turns,
            ),
        )

    def latency_of(self, first_group: int) -> LatencyOf:
        """Times of the environments of a step whose groups are numbered from `first_group` on."""
        drawn = self.latency.drawn(self.seed)
        return lambda episode, turn: drawn(episode._replace(group=first_group + episode.group), turn)

    def slots(self, profile: Profile, devices: Sequence[str], slowdown: float) -> tuple[EpisodeSlots, dict[str, str]]:
        """(the slots of all `devices`, slot -> its device)."""
        picture_s = sample_s(profile.numbers, slowdown)
        replicas = EpisodeReplicas(
            devices,
            profile.numbers.max_chunk_size,
            lambda count: count * picture_s,
            self.num_turns,
            self.latency_of(0),
        )
        width = len(str(self.slots_per_replica))
        numbers = {
            f"{device}/{index:0{width}d}": number
            for number, device in enumerate(devices)
            for index in range(self.slots_per_replica)
        }
        return EpisodeSlots(replicas, numbers), {slot: devices[number] for slot, number in numbers.items()}

    def batch(self, profile: Profile, num_devices: int, slowdown: float, *, is_redundant: bool) -> EpisodeBatch:
        """A step's episodes on devices that do nothing else meanwhile."""
        numbers, picture_s = profile.numbers, sample_s(profile.numbers, slowdown)
        return EpisodeBatch(
            numbers.num_prompts,
            numbers.group_size,
            self.num_turns,
            numbers.max_chunk_size,
            lambda count: count * picture_s,
            num_replicas=num_devices,
            extra_episodes=self.extra_episodes if is_redundant else 0,
        )
