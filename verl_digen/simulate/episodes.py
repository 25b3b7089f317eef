# SPDX-License-Identifier: Apache-2.0
"""Simulated episodes: turns on replicas, waits for environments, and batches of episodes. Pure.

    ready --> generated in a batch --> waits for its environment --> ready --> ... --> ended

- A replica that is free takes the turns that are ready, the one that has waited longest first, at most `batch_size`.
- An episode that waits for its environment has no place on a replica.
- The only model of an episode here: `EpisodeBatch` plays a batch of them on replicas that do nothing else (as where
  trainer and replicas take turns), and `EpisodeSlots` those that the planner gives to slots (separate pools).

Invariants (tests/simulate/test_episodes.py): times are those of coroutines that do the same; without a wait they are
those of the generations alone; a replica never has more episodes than slots; lock-step is the sum over turns of the
last answer's time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

from verl_digen.require import require
from verl_digen.schedulers.generation import Work
from verl_digen.schedulers.play import EPSILON_S
from verl_digen.schedulers.types import Chunk


class Episode(NamedTuple):
    """One episode."""

    group: int
    sample: int
    """Its number in the group."""
    chunk: int = 0
    """The chunk that carries it; an episode that is generated again has another one."""


LatencyOf = Callable[[Episode, int], float]
"""(episode, turn) -> seconds from its picture to the environment's answer."""


@dataclass(frozen=True)
class Latency:
    """Lognormal distribution of an environment's seconds per turn; equal for a standard deviation of 0.

    Example:
        Latency(2.0, 1.0).drawn(42)(Episode(group=3, sample=1), 0)   # the same number at every call
    """

    mean_s: float = 0.0
    std_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("mean", self.mean_s), ("standard deviation", self.std_s)):
            require(
                value >= 0 and math.isfinite(value),
                f"--environment-latency must have a {name} >= 0 s",
                value,
                "e.g. 2 or 2:1",
            )
        require(
            self.mean_s > 0 or self.std_s == 0,
            "--environment-latency must have a mean > 0 s with a standard deviation",
            self.mean_s,
            "e.g. 2:1",
        )

    def drawn(self, seed: int) -> LatencyOf:
        """Draws of a run; a function of the seed, the group, the sample and the turn."""
        if self.std_s == 0:
            return lambda episode, turn: self.mean_s
        variance = math.log1p((self.std_s / self.mean_s) ** 2)
        mean, sigma = math.log(self.mean_s) - variance / 2, math.sqrt(variance)
        return lambda episode, turn: Random(f"{seed} {episode.group} {episode.sample} {turn}").lognormvariate(
            mean, sigma
        )


class EpisodeReplicas:
    """Replicas that generate the turns of episodes; a state machine.

    Args:
        names: of the replicas.
        batch_size: maximum pictures of a generation.
        batch_s: pictures of a generation -> seconds.

    Example, one replica, episodes of two turns:
        replicas = EpisodeReplicas(["a"], 4, lambda count: 1.0, 2, lambda episode, turn: 3.0)
        replicas.begin(one := Episode(0, 0))
        (turn,) = replicas.start(0.0)      # Work("a", 0.0, 1.0, ...)
        replicas.end(turn)                 # []
        (wait,) = replicas.start(1.0)      # Work("", 1.0, 4.0, ...): the replica is free
        replicas.end(wait)                 # []: its second turn is ready
    """

    def __init__(
        self,
        names: Sequence[str],
        batch_size: int,
        batch_s: Callable[[int], float],
        num_turns: int,
        latency_of: LatencyOf,
    ):
        self.names = names
        self._batch_size, self._batch_s = batch_size, batch_s
        self._num_turns, self._latency_of = num_turns, latency_of
        self._ready: list[deque[Episode]] = [deque() for _ in names]
        self._running: list[tuple[Episode, ...]] = [() for _ in names]
        self._wake: set[int] = set()
        """Replicas that may be able to start a generation."""
        self._turns: dict[Episode, int] = {}
        """Open episode -> turns that are generated."""
        self._spent_s: dict[Episode, float] = {}
        """Open episode -> its share of the device's seconds."""
        self._home: dict[Episode, int] = {}
        """Episode that stays on one replica -> it."""
        self._answers: list[tuple[Episode, float]] = []
        """Episodes whose picture was just made, with the seconds that their environment takes."""
        self.cancelled_s = 0.0
        """Device-seconds that were spent on cancelled episodes."""

    def begin(self, episode: Episode, replica: int | None = None) -> None:
        """Begin an episode, on `replica` throughout; None: each turn goes to the least-loaded one."""
        self._turns[episode], self._spent_s[episode] = 0, 0.0
        if replica is not None:
            self._home[episode] = replica
        self._ask(episode)

    def cancel(self, episode: Episode) -> None:
        """Drop an episode, unless it has ended. A generation that it is part of goes on."""
        if self._turns.pop(episode, None) is None:
            return
        self.cancelled_s += self._spent_s.pop(episode)
        self._home.pop(episode, None)
        for ready in self._ready:
            if episode in ready:
                ready.remove(episode)

    def start(self, now_s: float) -> list[Work]:
        """Start what can start: waits for environments, and a generation on every free replica with ready turns."""
        works = [
            Work("", now_s, now_s + latency_s, (episode.group,), episode)
            for episode, latency_s in self._answers
            if episode in self._turns
        ]
        self._answers = []
        for number in sorted(self._wake):
            ready = self._ready[number]
            if self._running[number] or not ready:
                continue
            batch = tuple(ready.popleft() for _ in range(min(self._batch_size, len(ready))))
            seconds = self._batch_s(len(batch))
            for episode in batch:
                self._spent_s[episode] += seconds / len(batch)
            self._running[number] = batch
            groups = tuple(dict.fromkeys(episode.group for episode in batch))
            works.append(Work(self.names[number], now_s, now_s + seconds, groups, number))
        self._wake = set()
        return works

    def end(self, work: Work) -> list[Episode]:
        """Note that `work` has ended -> episodes that have ended with it."""
        if not work.device:
            return self._answered(work.subject)
        batch, self._running[work.subject] = self._running[work.subject], ()
        self._wake.add(work.subject)
        ended = []
        for episode in batch:
            if episode not in self._turns:  # cancelled
                continue
            latency_s = self._latency_of(episode, self._turns[episode])
            self._turns[episode] += 1
            if latency_s > EPSILON_S:
                self._answers.append((episode, latency_s))
            else:
                ended += self._answered(episode)
        return ended

    def _answered(self, episode: Episode) -> list[Episode]:
        if episode not in self._turns:
            return []
        if self._turns[episode] < self._num_turns:
            self._ask(episode)
            return []
        del self._turns[episode], self._spent_s[episode]
        self._home.pop(episode, None)
        return [episode]

    def _ask(self, episode: Episode) -> None:
        number = self._home.get(episode)
        if number is None:
            number = min(range(len(self.names)), key=lambda one: len(self._ready[one]) + len(self._running[one]))
        self._ready[number].append(episode)
        self._wake.add(number)


class Played(NamedTuple):
    """A batch that was played."""

    seconds: float
    busy_s: float
    """Device-seconds of generations until then, over all replicas."""


@dataclass(frozen=True)
class EpisodeBatch:
    """A batch of episodes on replicas that do nothing else, until `num_groups` groups have `group_size` episodes.

    Example:
        batch = EpisodeBatch(num_groups=2, group_size=1, num_turns=2, batch_size=1, batch_s=lambda count: 1.0)
        batch.lock_step(lambda episode, turn: 3.0).seconds       # 10.0: two turns of two generations and a wait
        batch.asynchronous(lambda episode, turn: 3.0).seconds    # 9.0: the first goes on while the other one waits
    """

    num_groups: int
    """Groups that must be complete."""
    group_size: int
    num_turns: int
    batch_size: int
    """Maximum pictures of a generation."""
    batch_s: Callable[[int], float]
    """Pictures of a generation -> seconds."""
    num_replicas: int = 1
    extra_groups: int = 0
    """Groups that are begun beyond `num_groups`; only with asynchrony."""
    extra_episodes: int = 0
    """Episodes of each group that are begun beyond `group_size`; only with asynchrony."""

    def lock_step(self, latency_of: LatencyOf) -> Played:
        """Play it in lock-step: no episode begins a turn before all have ended the one before."""
        turns = []
        for turn in range(self.num_turns):
            one_turn = replace(self, num_turns=1, extra_groups=0, extra_episodes=0)
            turns.append(one_turn.asynchronous(lambda episode, _, turn=turn: latency_of(episode, turn)))
        return Played(sum(played.seconds for played in turns), sum(played.busy_s for played in turns))

    def asynchronous(self, latency_of: LatencyOf) -> Played:
        """Play it with asynchrony: an episode goes on when its environment has answered. Further episodes of a complete
        group are cancelled at once."""
        names = [f"replica{number}" for number in range(self.num_replicas)]
        replicas = EpisodeReplicas(names, self.batch_size, self.batch_s, self.num_turns, latency_of)
        in_group = self.group_size + self.extra_episodes
        waiting = {
            group: {Episode(group, sample) for sample in range(in_group)}
            for group in range(self.num_groups + self.extra_groups)
        }
        for group in waiting:
            for sample in range(in_group):
                replicas.begin(Episode(group, sample))
        due: list[tuple[float, int, Work]] = []
        num_begun, num_complete, now_s, busy_s = 0, 0, 0.0, 0.0
        while True:
            for work in replicas.start(now_s):
                num_begun += 1
                busy_s += work.end_s - work.start_s if work.device else 0.0
                heappush(due, (work.end_s, num_begun, work))
            now_s = due[0][0]
            while due and due[0][0] <= now_s + EPSILON_S:
                for episode in replicas.end(heappop(due)[2]):
                    left = waiting[episode.group]
                    left.discard(episode)
                    if len(left) != self.extra_episodes:
                        continue
                    for other in sorted(left):
                        replicas.cancel(other)
                    left.clear()
                    num_complete += 1
                    if num_complete == self.num_groups:
                        running_s = sum(work.end_s - now_s for _, _, work in due if work.device)
                        return Played(now_s, busy_s - running_s)


class EpisodeSlots:
    """Slots whose samples are episodes: the port of `verl_digen.schedulers.simulation.PlannerRun`.

    Args:
        replica_of: slot -> number of its replica. The slots of a replica share its device.
    """

    def __init__(self, replicas: EpisodeReplicas, replica_of: Mapping[str, int]):
        self._replicas, self._replica_of = replicas, replica_of
        self._left: dict[int, tuple[Chunk, set[Episode]]] = {}
        """Id of a chunk in flight -> it, and its episodes that have not ended."""

    @property
    def cancelled_s(self) -> float:
        """Device-seconds that were spent on cancelled episodes."""
        return self._replicas.cancelled_s

    def begin(self, slot: str, chunk: Chunk) -> None:
        """Begin the chunk's episodes, all on the slot's replica."""
        episodes = [Episode(int(chunk.uid), sample, chunk.id) for sample in chunk.samples]
        self._left[chunk.id] = chunk, set(episodes)
        for episode in episodes:
            self._replicas.begin(episode, self._replica_of[slot])

    def start(self, now_s: float) -> list[Work]:
        """Start what can start."""
        return self._replicas.start(now_s)

    def end(self, work: Work) -> list[Chunk]:
        """Note the end of a turn or a wait -> chunks whose episodes have all ended."""
        chunks = []
        for episode in self._replicas.end(work):
            chunk, left = self._left[episode.chunk]
            left.discard(episode)
            if not left:
                del self._left[chunk.id]
                chunks.append(chunk)
        return chunks

    def cancel(self, chunk_id: int) -> bool:
        """Cancel the episodes of a chunk, if it has not ended; its slot is free at once."""
        if chunk_id not in self._left:
            return False
        for episode in sorted(self._left.pop(chunk_id)[1]):
            self._replicas.cancel(episode)
        return True
