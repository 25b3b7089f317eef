# SPDX-License-Identifier: Apache-2.0
"""Simulated episodes: times by hand, formulas, a slow simulation in asyncio, and runs that the planner plays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import mean, stdev

import pytest

from tests.chaos.loop import run_in_virtual_time
from tests.simulate.test_cluster import NUMBERS, PROFILE, h800
from verl_digen.devices import Pool
from verl_digen.schedulers.durations import KnownDurations
from verl_digen.schedulers.rules import BatchRules
from verl_digen.schedulers.simulation import PlannerRun
from verl_digen.simulate.cluster import ladder, run_colocated, run_split, simulated_rules
from verl_digen.simulate.costs import train_s
from verl_digen.simulate.episode_baselines import episode_baselines, run_together
from verl_digen.simulate.episode_runs import Episodes
from verl_digen.simulate.episodes import Episode, EpisodeBatch, EpisodeReplicas, Latency, LatencyOf

SMALL = EpisodeBatch(num_groups=2, group_size=1, num_turns=2, batch_size=1, batch_s=lambda count: 1.0)
WITHOUT_TAG = ("gap", "tsp", "tcss")


class CoroutineReplicas:
    """Replicas as coroutines; the least-loaded one gets a turn."""

    def __init__(self, batch: EpisodeBatch):
        self._batch = batch
        self._waiting: list[list[asyncio.Future[None]]] = [[] for _ in range(batch.num_replicas)]
        self._num_running = [0] * batch.num_replicas
        self._arrived = [asyncio.Event() for _ in range(batch.num_replicas)]

    async def serve(self, number: int) -> None:
        waiting = self._waiting[number]
        while True:
            while not waiting:
                self._arrived[number].clear()
                await self._arrived[number].wait()
            begun = waiting[: self._batch.batch_size]
            del waiting[: self._batch.batch_size]
            self._num_running[number] = len(begun)
            await asyncio.sleep(self._batch.batch_s(len(begun)))
            self._num_running[number] = 0
            for answer in begun:
                if not answer.done():
                    answer.set_result(None)

    async def generate(self) -> None:
        loads = [len(waiting) + self._num_running[number] for number, waiting in enumerate(self._waiting)]
        number = loads.index(min(loads))
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number].append(answer)
        self._arrived[number].set()
        try:
            await answer
        except asyncio.CancelledError:
            if answer in self._waiting[number]:
                self._waiting[number].remove(answer)
            raise


def played_s(batch: EpisodeBatch, latency_of: LatencyOf) -> float:
    """Seconds of the batch with coroutines for episodes and replicas, on a virtual clock."""

    async def run() -> float:
        loop, replicas = asyncio.get_running_loop(), CoroutineReplicas(batch)

        async def play(episode: Episode) -> None:
            for turn in range(batch.num_turns):
                await replicas.generate()
                await asyncio.sleep(latency_of(episode, turn))

        async def group(number: int) -> None:
            in_group = batch.group_size + batch.extra_episodes
            tasks = [asyncio.create_task(play(Episode(number, sample))) for sample in range(in_group)]
            for count, ended in enumerate(asyncio.as_completed(tasks), start=1):
                await ended
                if count == batch.group_size:
                    break
            for task in tasks:
                task.cancel()

        serving = [asyncio.create_task(replicas.serve(number)) for number in range(batch.num_replicas)]
        groups = [asyncio.create_task(group(number)) for number in range(batch.num_groups + batch.extra_groups)]
        for number, ended in enumerate(asyncio.as_completed(groups), start=1):
            await ended
            if number == batch.num_groups:
                break
        took_s = loop.time()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(*groups, *serving, return_exceptions=True)
        return took_s

    return run_in_virtual_time(run())


def drawn_from(rng: random.Random) -> LatencyOf:
    draws: dict[tuple[Episode, int], float] = {}

    def latency_s(episode: Episode, turn: int) -> float:
        return draws.setdefault((episode._replace(chunk=0), turn), rng.lognormvariate(0, 1))

    for group in range(6):
        for sample in range(7):
            for turn in range(4):
                latency_s(Episode(group, sample), turn)
    return latency_s


def drawn_batch(rng: random.Random, batch_s: Callable[[int], float]) -> EpisodeBatch:
    return EpisodeBatch(
        num_groups=rng.randint(1, 4),
        group_size=rng.randint(1, 4),
        num_turns=rng.randint(1, 4),
        batch_size=rng.randint(1, 5),
        batch_s=batch_s,
        num_replicas=rng.randint(1, 3),
        extra_groups=rng.choice([0, 0, 2]),
        extra_episodes=rng.choice([0, 0, 2]),
    )


def test_times_that_can_be_counted_by_hand():
    def three(episode: Episode, turn: int) -> float:
        return 3.0

    assert SMALL.lock_step(three) == (2 * (1 + 1 + 3), 4.0)
    assert SMALL.asynchronous(three) == (1 + 3 + 1 + 3 + 1, 4.0)
    slow = replace(SMALL, extra_groups=1).asynchronous(lambda episode, turn: 100.0 if episode.group == 0 else 0.0)
    assert slow.seconds == 5.0, "the generations of three episodes' first turns, and two further ones"
    redundant = replace(SMALL, num_groups=1, extra_episodes=1)
    assert redundant.asynchronous(lambda episode, turn: 100.0 if episode.sample == 0 else 1.0).seconds == 5.0


@pytest.mark.parametrize("seed", range(60))
def test_asynchrony_takes_what_coroutines_take(seed: int):
    rng = random.Random(seed)
    fixed_s, picture_s = rng.uniform(0.1, 1.0), rng.choice([0.0, rng.uniform(0.1, 1.0)])
    batch, latency_of = drawn_batch(rng, lambda count: fixed_s + count * picture_s), drawn_from(rng)
    assert batch.asynchronous(latency_of).seconds == pytest.approx(played_s(batch, latency_of), abs=1e-6)


def test_without_waits_both_take_the_generations_alone():
    batch = EpisodeBatch(num_groups=2, group_size=4, num_turns=3, batch_size=4, batch_s=lambda count: 0.5)
    assert batch.lock_step(lambda *unused: 0.0) == batch.asynchronous(lambda *unused: 0.0) == (3 * 2 * 0.5,) * 2


@pytest.mark.parametrize("seed", range(20))
def test_lock_step_is_the_sum_of_the_last_answers(seed: int):
    rng = random.Random(seed)
    batch, latency_of = replace(drawn_batch(rng, lambda count: 0.7), num_replicas=1), drawn_from(rng)
    expected = 0.0
    for turn in range(batch.num_turns):
        places = [Episode(*divmod(place, batch.group_size)) for place in range(batch.num_groups * batch.group_size)]
        expected += max(
            (1 + place // batch.batch_size) * 0.7 + latency_of(episode, turn) for place, episode in enumerate(places)
        )
    assert batch.lock_step(latency_of).seconds == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(20))
def test_where_generation_takes_no_time_the_modes_are_order_statistics_of_the_waits(seed: int):
    rng = random.Random(seed)
    batch, latency_of = drawn_batch(rng, lambda count: 0.0), drawn_from(rng)

    def group_s(group: int) -> float:
        totals = (
            sum(latency_of(Episode(group, sample), turn) for turn in range(batch.num_turns))
            for sample in range(batch.group_size + batch.extra_episodes)
        )
        return sorted(totals)[batch.group_size - 1]

    groups_s = sorted(map(group_s, range(batch.num_groups + batch.extra_groups)))
    assert batch.asynchronous(latency_of).seconds == pytest.approx(groups_s[batch.num_groups - 1])
    plain = replace(batch, extra_groups=0, extra_episodes=0)
    assert batch.lock_step(latency_of).seconds >= plain.asynchronous(latency_of).seconds - 1e-9


def test_latencies_are_lognormal_with_the_given_mean_and_deviation_and_the_same_at_every_call():
    latency_of = Latency(2.0, 1.0).drawn(7)
    draws = [latency_of(Episode(group, sample), turn) for group in range(40) for sample in range(25) for turn in (0, 1)]
    assert mean(draws) == pytest.approx(2.0, rel=0.05) and stdev(draws) == pytest.approx(1.0, rel=0.1)
    assert draws[0] == latency_of(Episode(0, 0, chunk=9), 0) and len({*draws}) == len(draws)
    assert Latency(2.0).drawn(7)(Episode(0, 0), 0) == 2.0
    assert Latency(2.0, 1.0).drawn(8)(Episode(0, 0), 0) != draws[0]


# -- runs ----------------------------------------------------------------------------------------------------------
def test_an_episode_costs_the_device_seconds_and_rows_of_its_turns():
    numbers = Episodes(3).profile_of(PROFILE).numbers
    assert (numbers.num_steps, numbers.decode_s, numbers.num_trained_steps) == (30, 1.5, 27)
    ranks = {"slowdown": 1.0, "has_tsp": False}
    assert train_s(numbers, 2, 4, **ranks) == pytest.approx(3 * train_s(NUMBERS, 2, 4, **ranks))


@pytest.mark.parametrize("chosen", ladder(WITHOUT_TAG), ids="+".join)
def test_without_waits_and_with_one_slot_a_run_is_that_without_environments(chosen):
    split, episodes = h800(6, 5), Episodes(3)
    whole = episodes.profile_of(PROFILE)
    rules = replace(simulated_rules(whole, split, chosen), chunk_size=1)
    plain = run_split(whole, split, chosen, num_steps=8, rules=rules)
    played = run_split(PROFILE, split, chosen, num_steps=8, episodes=episodes)
    assert played.step_s == pytest.approx(plain.step_s, rel=1e-9)
    assert played.idle == pytest.approx(plain.idle, abs=1e-9)
    assert (played.name, played.stale, played.bound_s) == (plain.name, plain.stale, plain.bound_s)


def test_without_waits_a_colocated_run_is_that_without_environments():
    """32 episodes on 16 devices."""
    plain = run_colocated(Episodes(3).profile_of(PROFILE), Pool(16, "H800"), has_tsp=True)
    for mode in ("asynchronous", "lock-step"):
        played = run_together(PROFILE, Pool(16, "H800"), Episodes(3), mode, has_tsp=True)
        assert (played.step_s, played.idle["all"]) == pytest.approx((plain.step_s, plain.idle["all"]))


class Watched:
    """Slots that note their chunks in flight."""

    def __init__(self, slots, replica_of):
        self._slots, self._replica_of = slots, replica_of
        self.open: dict[str, tuple[int, int]] = {}
        """Slot -> (id, version) of its chunk."""
        self.most, self.num_cancelled = 0, 0

    @property
    def cancelled_s(self):
        return self._slots.cancelled_s

    def begin(self, slot, chunk):
        assert slot not in self.open, "one episode at a time"
        self.open[slot] = chunk.id, chunk.version
        here = [found for other, found in self.open.items() if self._replica_of[other] == self._replica_of[slot]]
        assert len({version for _, version in here}) == 1, "a replica has one version"
        self.most = max(self.most, len(here))
        self._slots.begin(slot, chunk)

    def start(self, now_s):
        works = self._slots.start(now_s)
        assert len({work.device for work in works if work.device}) == sum(bool(work.device) for work in works)
        return works

    def end(self, work):
        chunks = self._slots.end(work)
        for chunk in chunks:
            self._forget(chunk.id)
        return chunks

    def cancel(self, chunk_id):
        self._forget(chunk_id)
        self.num_cancelled += 1
        return self._slots.cancel(chunk_id)

    def _forget(self, chunk_id):
        (slot,) = [slot for slot, (found, _) in self.open.items() if found == chunk_id]
        del self.open[slot]


@pytest.mark.parametrize("seed", range(20))
def test_a_replica_has_at_most_its_slots_of_episodes_of_one_version(seed: int):
    rng = random.Random(seed)
    num_devices, num_slots, max_versions = rng.randint(1, 3), rng.randint(1, 4), rng.randint(0, 2)
    episodes = Episodes(rng.randint(1, 3), Latency(2.0, 2.0), num_slots, extra_prompts=rng.choice([0, 2]), seed=seed)
    generator, replica_of = episodes.slots(PROFILE, [f"d{number}" for number in range(num_devices)], 1.0)
    watched = Watched(generator, replica_of)
    rules = BatchRules(4, 3, chunk_size=1, max_versions=max_versions, extra_prompts=episodes.extra_prompts)
    durations = KnownDurations(dict.fromkeys(replica_of, 5.0), [1.0], 0.1, [1.0] * 8)
    run = PlannerRun(
        rules,
        durations,
        [*replica_of],
        num_batches=4,
        commit_s=0.5,
        keeps_events=True,
        generator=watched,
        replica_of=replica_of,
    )
    run.play()
    assert [report.num_samples for report in run.reports] == [12] * 4
    assert watched.most == min(num_slots, 12)
    assert (watched.num_cancelled > 0) <= (episodes.extra_prompts > 0)
    busy: dict[str, float] = {}
    for event in sorted(event for event in run.events if event.what == "generate"):
        assert event.start_s >= busy.get(event.who, 0.0) - 1e-9, "a device generates one batch at a time"
        busy[event.who] = event.end_s


@pytest.mark.parametrize("seed", range(10))
def test_no_run_of_episodes_beats_the_bound(seed: int):
    rng = random.Random(seed)
    split = h800(rng.randint(2, 8), rng.randint(1, 8))
    episodes = Episodes(
        rng.randint(1, 3),
        Latency(rng.uniform(0.1, 5.0), rng.uniform(0.0, 5.0)),
        slots_per_replica=rng.choice([1, 4, 16]),
        extra_prompts=rng.choice([0, 1]),
        seed=seed,
    )
    for chosen in ladder(WITHOUT_TAG):
        outcome = run_split(PROFILE, split, chosen, num_steps=10, episodes=episodes)
        assert outcome.bound_s is not None and outcome.step_s >= outcome.bound_s * (1 - 1e-9)
        assert all(0 <= share <= 1 for share in outcome.idle.values())
        assert outcome.name.endswith("+redundant") == (episodes.extra_prompts > 0)


def test_further_slots_keep_a_device_at_work_while_episodes_wait():
    """Pictures of 1.5 s, and an environment that takes four times that."""
    split, chosen = h800(8, 4), ("gap", "tsp")
    idle = [
        run_split(PROFILE, split, chosen, num_steps=6, episodes=Episodes(4, Latency(6.0), slots)).idle["generator"]
        for slots in (1, 2, 5)
    ]
    assert idle[0] > 0.75 and idle[0] > idle[1] > idle[2]


def test_modes_of_episodes_are_compared_where_all_devices_generate_together():
    runs = episode_baselines(PROFILE, [Pool(16, "H800")], Episodes(4, Latency(2.0, 2.0), extra_episodes=2))
    assert [run.name for run in runs] == ["lock-step+tsp", "colocated", "colocated+tsp", "colocated+tsp+redundant"]
    lock_step, _, asynchronous, redundant = runs
    assert lock_step.step_s > asynchronous.step_s and lock_step.num_samples == redundant.num_samples == 32
    assert redundant.step_s != asynchronous.step_s


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Latency(-1.0), "must have a mean >= 0 s, got -1.0"),
        (lambda: Latency(0.0, 1.0), "mean > 0 s with a standard deviation, got 0.0"),
        (lambda: Episodes(0), r"--turns must lie in \[1, 1000\], got 0"),
        (lambda: Episodes(1, slots_per_replica=0), r"--slots-per-replica must lie in \[1, 10000\], got 0"),
        (
            lambda: run_split(PROFILE, h800(2, 2), ("tag",), num_steps=5, episodes=Episodes(2)),
            "--techniques must be without tag with --turns, got 'tag'",
        ),
    ],
)
def test_bad_settings_of_episodes_are_told_by_their_option(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_episode_that_was_cancelled_while_it_was_generated_asks_for_nothing_more():
    replicas = EpisodeReplicas(["a"], 2, lambda count: 1.0, 2, lambda episode, turn: 0.0)
    one, other = Episode(0, 0), Episode(0, 1)
    for episode in (one, other):
        replicas.begin(episode)
    (turn,) = replicas.start(0.0)
    replicas.cancel(one)
    assert replicas.cancelled_s == 0.5 and replicas.end(turn) == []
    (turn,) = replicas.start(1.0)
    assert replicas.end(turn) == [other] and replicas.start(2.0) == []
