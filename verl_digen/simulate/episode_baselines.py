# SPDX-License-Identifier: Apache-2.0
"""Colocated runs of episodes: all devices generate the episodes of a step, then they train, and so on.

A step is the mean over `NUM_STEPS` steps; their groups have the same times of their environments as those of the runs
on separate pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Literal

from verl_digen.devices import Pool
from verl_digen.schedulers.simulation import What
from verl_digen.simulate.cluster import (
    COLOCATED,
    COLOCATED_STEPS,
    COLOCATED_TSP,
    Outcome,
    pools_in_turns,
    turns_outcome,
)
from verl_digen.simulate.costs import train_s
from verl_digen.simulate.episode_runs import REDUNDANT, Episodes
from verl_digen.simulate.episodes import Played
from verl_digen.simulate.profile import Profile

LOCK_STEP = "lock-step+tsp"
"""Name of the run in which no episode begins a turn before all have ended the one before."""
NUM_STEPS = 20
"""Number of steps whose episodes are played."""

Mode = Literal["lock-step", "asynchronous", "redundant"]


def episode_baselines(profile: Profile, pools: Sequence[Pool], episodes: Episodes) -> list[Outcome]:
    """Runs on all devices of `pools` together, at the slowest type's speed: in lock-step, asynchronous without and with
    TSP, and with redundant episodes if there are any."""
    pool, devices, _ = pools_in_turns(profile, pools)[0]
    modes: list[tuple[Mode, bool]] = [("lock-step", True), ("asynchronous", False), ("asynchronous", True)]
    if episodes.extra_episodes:
        modes.append(("redundant", True))
    return [run_together(profile, pool, episodes, mode, has_tsp=has_tsp, devices=devices) for mode, has_tsp in modes]


def run_together(
    profile: Profile, pool: Pool, episodes: Episodes, mode: Mode, *, has_tsp: bool, devices: str | None = None
) -> Outcome:
    """Simulate a colocated run of episodes.

    Args:
        devices: the devices in words; None: `pool`, "together".

    step = seconds of the episodes + score_s + switch_s + training of P groups on N ranks + commit_s
    """
    num_devices, slowdown = pool.num_devices, pool.slowdown(profile.device)
    played = _mean_step(profile, pool, episodes, mode)
    whole = episodes.profile_of(profile)
    numbers = whole.numbers
    training_s = train_s(numbers, numbers.num_prompts, num_devices, slowdown=slowdown, has_tsp=has_tsp)
    parts: tuple[tuple[What, float], ...] = (
        ("generate", played.seconds),
        ("score", numbers.score_s),
        ("switch", numbers.switch_s),
        ("train", training_s),
        ("commit", numbers.commit_s),
    )
    name = LOCK_STEP if mode == "lock-step" else COLOCATED_TSP if has_tsp else COLOCATED
    return turns_outcome(
        whole,
        pool,
        name + (REDUNDANT if mode == "redundant" else ""),
        [parts] * COLOCATED_STEPS,
        busy_s=played.busy_s / num_devices + training_s + numbers.commit_s,
        devices=devices,
    )


def _mean_step(profile: Profile, pool: Pool, episodes: Episodes, mode: Mode) -> Played:
    """Generation of a step on all devices."""
    batch = episodes.batch(profile, pool.num_devices, pool.slowdown(profile.device), is_redundant=mode == "redundant")
    play = batch.lock_step if mode == "lock-step" else batch.asynchronous
    steps = [play(episodes.latency_of(step * profile.numbers.num_prompts)) for step in range(NUM_STEPS)]
    return Played(mean(step.seconds for step in steps), mean(step.busy_s for step in steps))
