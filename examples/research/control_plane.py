# SPDX-License-Identifier: Apache-2.0
"""Cost of the control plane on up to 1,024 devices: decision times (measured), messages and memory (counted).

    python examples/research/control_plane.py                              # the table of docs/control_plane.md
    python examples/research/control_plane.py --devices 256 --steps 10

Plays the live planner in the simulator, with TAG and BTS, on the shipped profiles with two prompts for every four
devices that train, so that a batch fills the cluster. Times are CPU time of one core, without Ray; "decision" is one
answer of the planner: what the trainer does next, or the next chunks of all slots that are free. The trainer's calls
are those that the driver makes itself, to relays (`verl_digen.processes.relays`); `rank_calls.py` times them.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from verl_digen.hardware.devices import Pool
from verl_digen.processes.relays import Together, relayed
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.simulation import PlannerRun
from verl_digen.schedulers.types import (
    Assist,
    BatchReport,
    Fragment,
    Generate,
    LoadWeights,
    SlotDecision,
    TrainerDecision,
)
from verl_digen.tools.simulate.cluster import Split, durations_of, simulated_rules
from verl_digen.tools.simulate.profile import Profile, load_profile, profile_names

TECHNIQUES = ("gap", "tsp", "tag")

DEVICES_PER_NODE = 8


@dataclass
class Counted:
    """Decisions of a run: their seconds, and the calls that they make."""

    trainer_s: list[float] = field(default_factory=list)
    slots_s: list[float] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    """Kind of call -> number; an answer comes back for each."""


class TimedPlanner(BatchPlanner):
    """The live planner, with a clock around its decisions."""

    counted: Counted
    num_callees: int
    """Calls of the driver that reach all ranks."""

    def next_for_trainer(self, now_s: float) -> TrainerDecision:
        began_s = time.thread_time()
        decision = super().next_for_trainer(now_s)
        self.counted.trainer_s.append(time.thread_time() - began_s)
        calls = self.counted.calls
        if isinstance(decision, Fragment | BatchReport):
            calls["train" if isinstance(decision, Fragment) else "commit"] += self.num_callees
        elif isinstance(decision, Assist):
            calls["assist"] += self.num_callees
        return decision

    def assign(self, now_s: float) -> list[SlotDecision]:
        began_s = time.thread_time()
        decisions = super().assign(now_s)
        self.counted.slots_s.append(time.thread_time() - began_s)
        for decision in decisions:
            self.counted.calls["generate" if isinstance(decision, Generate) else "load"] += 1
            self.counted.calls["score"] += isinstance(decision, Generate)
        assert all(isinstance(decision, Generate | LoadWeights) for decision in decisions)
        return decisions


class TimedRun(PlannerRun):
    """A simulated run of `TimedPlanner`."""

    counted: Counted
    num_callees: int

    def make_planner(self) -> BatchPlanner:
        planner = TimedPlanner(self.rules, self.durations, first_batch=0, num_batches=self.num_batches)
        planner.counted, planner.num_callees = self.counted, self.num_callees
        return planner


@dataclass(frozen=True)
class Cost:
    """Control plane of a run, per step."""

    step_s: float
    counted: Counted
    num_steps: int

    @property
    def busy_share(self) -> float:
        """Share of a step in which the planner computes."""
        return (sum(self.counted.trainer_s) + sum(self.counted.slots_s)) / self.num_steps / self.step_s

    @property
    def calls_per_step(self) -> dict[str, float]:
        return {kind: number / self.num_steps for kind, number in sorted(self.counted.calls.items()) if number}


def large(profile: Profile, num_trainer: int) -> Profile:
    """The profile with two prompts for every four devices that train."""
    return replace(profile, numbers=replace(profile.numbers, num_prompts=max(1, num_trainer // 2)))


def play(profile: Profile, split: Split, num_steps: int) -> Cost:
    """Run a split, with the times of its decisions."""
    rules = simulated_rules(profile, split, TECHNIQUES)
    slots = [f"slot{index:04d}" for index in range(split.generator.num_devices)]
    run = TimedRun(
        rules,
        durations_of(profile, split, slots, rules, has_tsp=True),
        slots,
        num_batches=num_steps,
        commit_s=profile.numbers.commit_s,
    )
    nodes = [f"n{rank // DEVICES_PER_NODE}" for rank in range(split.trainer.num_devices)]
    run.counted, run.num_callees = (
        Counted(),
        len(relayed([Together([])] * len(nodes), nodes, start=lambda node, callees: Together([])).callees),
    )
    run.play()
    return Cost(run.commits_s[-1] / num_steps, run.counted, num_steps)


def peak_bytes(profile: Profile, split: Split, num_steps: int) -> int:
    """Largest memory of a run, planner and simulation together, as Python's allocator counts it."""
    tracemalloc.start()
    play(profile, split, num_steps)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def percentile(seconds: Sequence[float], share: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profiles", default=",".join(profile_names()))
    args = parser.parse_args()
    gc.freeze()  # as a run does: `verl_digen.trainer.nodes`
    print(
        "| profile | split | trainer's decision, ms: median, 99 %, largest | slots', ms: median, largest | planner | "
    )
    for name in args.profiles.split(","):
        for share in (5 / 8, 7 / 8):
            num_trainer = int(args.devices * share)
            base = load_profile(name)
            profile = large(base, num_trainer)
            split = Split(Pool(num_trainer, base.device), Pool(args.devices - num_trainer, base.device))
            cost = play(profile, split, args.steps)
            trainer, slots = (
                [1e3 * second for second in seconds] for seconds in (cost.counted.trainer_s, cost.counted.slots_s)
            )
            print(
                f"| `{name}` | {split} | {median(trainer):.2f}, {percentile(trainer, 0.99):.1f}, {max(trainer):.1f} | "
                f"{median(slots):.2f}, {max(slots):.1f} | {cost.busy_share:.2%} of {cost.step_s:.1f} s | "
                f"{', '.join(f'{kind} {number:.0f}' for kind, number in cost.calls_per_step.items())} | "
                f"{peak_bytes(profile, split, 2) / 1e6:.1f} MB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
