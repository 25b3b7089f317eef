# SPDX-License-Identifier: Apache-2.0
"""Comparison of ways to run the same work on the same devices, all simulated. Pure.

- Colocated runs take all devices in turns; runs with separate pools are at their own best split, unless two pools are
  given.
- Every run of a comparison trains the same rows: a window, or a reward model on the devices, is set for all of them
  (`windowed`, `with_reward`).

Invariants (tests/simulate/test_comparison.py): the same arguments give the same numbers; a run is what
`verl_digen.simulate.cluster` or `verl_digen.simulate.verl_omni` gives for it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from verl_digen.devices import Pool
from verl_digen.simulate.cluster import (
    COLOCATED,
    COLOCATED_TSP,
    Outcome,
    Split,
    run_colocated,
    run_split,
    together,
)
from verl_digen.simulate.profile import Profile
from verl_digen.simulate.splits import best_split
from verl_digen.simulate.verl_omni import NAME, VERL_OMNI, Reward, Way, run_verl_omni

ELSEWHERE = f"{NAME}, reward elsewhere"
"""verl-omni's way with the reward model on devices of its own."""

ALONE = f"{COLOCATED_TSP}, faster devices alone"
"""Colocated on the pool of the faster type, the other one unused."""

GAP_TSP, STRICT, EVERYTHING = "gap+tsp", "gap+tsp+tag", "gap+tsp+tag+tcss"
"""Separate pools; `STRICT` is on-policy with all that needs no stale sample, `EVERYTHING` may begin a batch early."""

NUM_STEPS = 40
"""Simulated steps of a run with separate pools, the default of `digen simulate`."""


@dataclass(frozen=True)
class Comparison:
    """Ways to do the same work on the same devices."""

    profile: Profile
    devices: str
    runs: Mapping[str, Outcome]
    """Name -> run: `NAME`, `ELSEWHERE`, `COLOCATED`, `COLOCATED_TSP`, `GAP_TSP`, `STRICT`, `EVERYTHING`; on two types
    of devices `ALONE`, too."""

    def speedup(self, name: str, over: str) -> float:
        """Factor by which the run `name` is faster than `over`."""
        return self.runs[over].step_s / self.runs[name].step_s

    @property
    def training_share(self) -> float:
        """Share of training and commit in the step of `COLOCATED_TSP`, all of which no other way makes shorter."""
        run = self.runs[COLOCATED_TSP]
        seconds = sum(event.end_s - event.start_s for event in run.events if event.what in ("train", "commit"))
        return seconds / run.window_s[1]


def with_reward(profile: Profile, reward_s: float) -> Profile:
    """The profile with a reward model on the devices that generate: each sample takes them that much longer.

    Args:
        reward_s: seconds of a device of the profile's type per sample.
    """
    numbers = replace(profile.numbers, decode_s=profile.numbers.decode_s + reward_s)
    sources = {**profile.sources, "decode_s": f"{profile.sources['decode_s']}, and {reward_s} s of a reward model"}
    return replace(profile, numbers=numbers, sources=sources)


def compare(profile: Profile, pools: Sequence[Pool], *, num_steps: int = NUM_STEPS) -> Comparison:
    """Simulate every way.

    Args:
        pools: all devices, of which each run takes its best split; or the training and the generating pool.
    """
    everything = together(profile, pools)
    runs = {
        NAME: run_verl_omni(profile, everything),
        ELSEWHERE: run_verl_omni(profile, everything, reward="elsewhere"),
        COLOCATED: run_colocated(profile, everything, has_tsp=False),
        COLOCATED_TSP: run_colocated(profile, everything, has_tsp=True),
    }
    if len(pools) == 2:
        faster = min(pools, key=lambda pool: pool.slowdown(profile.device))
        runs[ALONE] = run_colocated(profile, faster, has_tsp=True)
    for name in (GAP_TSP, STRICT, EVERYTHING):
        runs[name] = run_separate(profile, pools, name, num_steps=num_steps)
    return Comparison(profile, " + ".join(str(pool) for pool in pools), runs)


def run_separate(profile: Profile, pools: Sequence[Pool], name: str, *, num_steps: int = NUM_STEPS) -> Outcome:
    """Simulate separate pools; `pools` as for `compare`.

    Args:
        name: the techniques, e.g. `STRICT`.
    """
    techniques = name.split("+")
    is_given = len(pools) == 2
    split = Split(*pools) if is_given else best_split(profile, pools[0], techniques, num_steps=num_steps)
    return run_split(profile, split, techniques, num_steps=num_steps)


def without_overheads(way: Way = VERL_OMNI) -> list[tuple[str, Way, Reward]]:
    """verl-omni's way, and what it takes more than a colocated run taken away, one after the other.

    Returns:
        (what is taken away, way, place of the reward model), each with all that stands before it.
    """
    batched = replace(way, generation_factor=1.0)
    one_update = replace(batched, num_updates=1, log_prob_samples=0)
    efficient = replace(one_update, replay_factor=1.0)
    return [
        ("as published", way, "in turns"),
        ("reward elsewhere", way, "elsewhere"),
        ("samples generated in batches", batched, "elsewhere"),
        ("one update, no log-prob pass", one_update, "elsewhere"),
        ("trainer as fast as the profile's", efficient, "elsewhere"),
        ("switching at the speed of the host's memory", replace(efficient, switch_factor=1.0), "elsewhere"),
    ]
