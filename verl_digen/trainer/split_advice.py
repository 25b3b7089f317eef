# SPDX-License-Identifier: Apache-2.0
"""Advice on another split of a run's devices, from the measured durations of its own steps. Pure.

- Medians over the measured steps become a profile; the live planner plays it for the split of the run and for those
  that config and nodes allow, as in `digen simulate`. Memory is not known here: `digen plan` says whether it fits.
- What the given split takes beyond its simulation (`error`) stays: only the simulated difference is taken off.
- The gain must exceed `MIN_GAIN`, `NOISES` standard errors of the median step, and the simulation's own error.

| what a timeline does not say | assumed |
| --- | --- |
| gathering of weights, where the trainer never assists | part of a row's time |
| whether an assist gathered them once, or at every step | at every step, with its time spread over them |
| speed of a type of device in the other role, of two types | by the ratio of their peaks |
| scores, commit and publication | the same with any split |

Invariant (tests/trainer/test_split_advice.py): for simulated runs with a bad split it names one that is within 3 % of
the best by exhaustive simulation; for a run with the best one it says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median

from verl_digen.observe.step_costs import StepParts, rank_row_s, slot_sample_s
from verl_digen.schedulers.rules import BatchRules
from verl_digen.simulate.cluster import Split, run_split
from verl_digen.simulate.layout import pool_overrides, type_overrides
from verl_digen.simulate.profile import NEVER, Numbers, Profile
from verl_digen.simulate.splits import SEARCH_STEPS, Limits, Placed, best_of, placed_splits

MIN_GAIN = 1.08
"""Times as fast from which on advice is given: a stop and a start take minutes, and a gain that is predicted from the
assists of another split errs by up to 0.06 (`tests/trainer/test_split_advice.py`)."""
NOISES = 3.0
"""Standard errors of the median step that a gain must exceed."""
MAD_TO_STD = 1.4826
"""Standard deviation of a normal variable over the median of its absolute deviations."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, of many normal variables."""
ONE_TILE = 10**9
"""Rows of a tile: what tiles cost is in the measured time of a row."""


@dataclass(frozen=True)
class Setting:
    """Facts of a run that do not change while it goes on."""

    split: Split
    nodes: Mapping[str, Sequence[int]]
    """Type of device -> devices of each node."""
    limits: Limits
    rules: BatchRules
    """The planner's rules of the run as it is."""
    num_steps: int
    """Denoising steps of a sample."""
    num_rows: int
    """Trained rows of a sample."""
    slots_per_replica: int = 1


@dataclass(frozen=True)
class Advice:
    """A split that would be faster, with the figures that say so."""

    given: Split
    placed: Placed
    measured_s: float
    """Median step of the run."""
    expected_s: float
    num_steps: int
    """Steps that were measured."""

    @property
    def gain(self) -> float:
        """Times as fast."""
        return self.measured_s / self.expected_s

    @property
    def overrides(self) -> list[str]:
        split = self.placed.split
        changes_types = (split.trainer.device, split.generator.device) != (
            self.given.trainer.device,
            self.given.generator.device,
        )
        types = type_overrides(split.trainer, split.generator) if changes_types else []
        return [*pool_overrides(self.placed.trainer, self.placed.generator), *types]


def advise(setting: Setting, steps: Sequence[StepParts]) -> Advice | None:
    """Advice after these steps; None if the split is as good as any, or the gain is in doubt."""
    seconds = [step.step_s for step in steps]
    measured_s = median(seconds)
    profile = profile_of(setting, steps)

    def step_s(split: Split) -> float:
        ranks = split.trainer.num_devices // setting.limits.sequence_parallel
        rules = replace(setting.rules, num_trainer_ranks=ranks)
        return run_split(profile, split, rules.techniques, num_steps=SEARCH_STEPS, rules=rules).step_s

    given_s = step_s(setting.split)
    found = best_of(placed_splits(setting.nodes, setting.limits), lambda placed: step_s(placed.split))
    if found is None:
        return None
    placed, best_s = found
    expected_s = best_s * min(1.0, measured_s / given_s) + max(0.0, measured_s - given_s)
    error = abs(measured_s - given_s) / measured_s
    needed = 1 + max(MIN_GAIN - 1, NOISES * noise(seconds), error)
    if measured_s / expected_s <= needed:
        return None
    return Advice(setting.split, placed, measured_s, expected_s, len(steps))


def noise(seconds: Sequence[float]) -> float:
    """Standard error of the median, as a share of it; from the median of the absolute deviations."""
    middle = median(seconds)
    deviation = MAD_TO_STD * median(abs(value - middle) for value in seconds)
    return MEDIAN_ERROR * deviation / sqrt(len(seconds)) / middle


def profile_of(setting: Setting, steps: Sequence[StepParts]) -> Profile:
    """The measured durations as a profile for devices of the trainer's type."""
    split, rules = setting.split, setting.rules
    device = split.trainer.device
    on_slot_s = slot_sample_s([chunk for step in steps for chunk in step.chunks])
    # a replica of k devices counts as k slots of one device each, with together its speed
    on_device_s = on_slot_s * setting.limits.replica_devices / setting.slots_per_replica
    denoise_s = on_device_s / split.generator.slowdown(device) / setting.num_steps
    num_ranks = split.trainer.num_devices
    numbers = Numbers(
        num_prompts=rules.num_prompts,
        group_size=rules.group_size,
        num_steps=setting.num_steps,
        num_trained_steps=setting.num_rows,
        max_chunk_size=rules.max_chunk_size,
        rows_per_tile=ONE_TILE,
        min_trainer_devices=1,
        min_gathering_devices=NEVER,
        step_s=denoise_s,
        decode_s=0.0,
        row_s=rank_row_s([part for step in steps for part in step.fragments], num_ranks, setting.num_rows),
        gather_s=_gather_s([part for step in steps for part in step.assists], num_ranks, setting.num_steps, denoise_s),
        score_s=median([seconds for step in steps for seconds in step.scores_s] or [0.0]),
        commit_s=median(step.commit_s for step in steps),
        switch_s=0.0,
    )
    return Profile("run", "this run", "measured by the run itself", device, numbers, {})


def _gather_s(assists: Sequence[tuple[int, float]], num_ranks: int, num_steps: int, denoise_s: float) -> float:
    """Seconds of gathering the weights, where it is what an assist waits for; 0.0 if it is not, or nothing assisted."""
    if not assists or num_ranks == 1:
        return 0.0
    excess = [seconds / num_steps - -(-number // num_ranks) * denoise_s for number, seconds in assists]
    if median(excess) <= 0:
        return 0.0
    return median(seconds / num_steps for _, seconds in assists) * num_ranks / (num_ranks - 1)


def advice_line(advice: Advice, *, saves: bool) -> str:
    """One line for the log.

    Args:
        saves: True if the run writes checkpoints.
    """
    split = advice.placed.split
    words = " ".join(advice.overrides)
    way = (
        f"after a checkpoint, stop and start the same command again with trainer.resume_mode=auto {words}"
        if saves
        else f"this run writes no checkpoint (trainer.save_freq) to continue from; for the next one: {words}"
    )
    return (
        f"another split of the same devices would be faster: {split.trainer} to train and {split.generator} to "
        f"generate, {advice.expected_s:.3g} s a step in place of {advice.measured_s:.3g} with {advice.given} "
        f"({advice.gain:.2f} times as fast; simulated on the medians of {advice.num_steps} steps); `digen plan` with "
        f"the same words says whether it fits the memory; {way}"
    )
