# SPDX-License-Identifier: Apache-2.0
"""Runs with variance: separate pools, colocated, and colocated as verl-omni runs it. Pure.

All of them have the same draws, see `verl_digen.simulate.variance`. A split is one that was found without variance, as
a plan is made before anybody knows which devices are slow.

    colocated                 samples are dealt to the devices before the first one is generated, as verl does it
    colocated, shared queue   a device takes the next sample when it is free: what a better balancer could make of it

Invariants (tests/simulate/test_varied.py): without variance a run is that of `verl_digen.simulate.cluster` or
`verl_digen.simulate.verl_omni`; the same seed gives the same run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from verl_digen.devices import Pool
from verl_digen.schedulers.simulation import What
from verl_digen.simulate.cluster import (
    COLOCATED,
    COLOCATED_TSP,
    SHARED_QUEUE,
    Outcome,
    Split,
    check_run,
    durations_of,
    outcome_of,
    pools_in_turns,
    simulated_rules,
    slot_names,
    slot_sample_s,
    steady_window,
    turns_outcome,
)
from verl_digen.simulate.costs import sample_s, train_s
from verl_digen.simulate.phases import NUM_STEPS, Phases
from verl_digen.simulate.profile import Profile
from verl_digen.simulate.variance import Ranks, Variance
from verl_digen.simulate.varied_run import VariedRun
from verl_digen.simulate.verl_omni import NAME, VERL_OMNI, Reward, Way, even_parts, replay_s

Parts = tuple[tuple[What, float], ...]


def run_varied_split(
    profile: Profile,
    split: Split,
    techniques: Collection[str],
    variance: Variance,
    *,
    num_steps: int,
    stale_fraction: float = 1.0,
    keeps_events: bool = False,
) -> Outcome:
    """Simulate separate pools with variance; arguments as for `run_split`."""
    check_run(profile, split, techniques, num_steps)
    run = varied_run(
        profile,
        split,
        techniques,
        variance,
        num_steps=num_steps,
        stale_fraction=stale_fraction,
        keeps_events=keeps_events,
    )
    run.play()
    num_samples, needed, ahead = profile.numbers.num_prompts * profile.numbers.group_size, 0, []
    for report, generated in zip(run.reports, run.generated_at_commit, strict=True):
        needed += num_samples - report.num_assisted
        ahead.append(generated - needed)
    if "tcss" in techniques:
        ahead.pop()  # nothing is begun early in the last step, because no step follows
    first, last = steady_window(ahead) if variance.is_constant and not run.deaths_s else second_half(len(ahead))
    all_slots_s = 1 / sum(1 / seconds for seconds in run.durations.sample_s.values())
    charged_s = max(0.0, ahead[first] - ahead[last]) * all_slots_s
    outcome = outcome_of(profile, split, techniques, run, (first, last), charged_s=charged_s)
    start_s, end_s = outcome.window_s
    deaths = [death_s for death_s in run.deaths_s if start_s < death_s <= end_s]
    mean_ahead = sum(ahead[first : last + 1]) / (last - first + 1)
    return with_stops(
        replace(outcome, bound_s=None, num_deaths=len(deaths)),
        variance,
        split.trainer.num_devices,
        refill_s=max(0.0, mean_ahead) * all_slots_s,
    )


def second_half(num_commits: int) -> tuple[int, int]:
    """(first, last) commit of the second half of a run, by whose beginning generation is as far ahead as it gets."""
    return num_commits // 2 - 1, num_commits - 1


def varied_run(
    profile: Profile,
    split: Split,
    techniques: Collection[str],
    variance: Variance,
    *,
    num_steps: int,
    stale_fraction: float = 1.0,
    keeps_events: bool = False,
) -> VariedRun:
    """The run to play; slots are the generator's devices."""
    rules = simulated_rules(profile, split, techniques, stale_fraction=stale_fraction)
    slots = slot_names(split.generator.num_devices)
    factors = variance.slow_factors(split.num_devices, is_separate=True)
    of_trainer, of_slots = factors[: split.trainer.num_devices], factors[split.trainer.num_devices :]
    return VariedRun(
        rules,
        {
            slow: durations_of(profile, split, slots, rules, has_tsp="tsp" in techniques, trainer_slow=slow)
            for slow in sorted(set(of_trainer))
        },
        {slot: slot_sample_s(profile, split) * slow for slot, slow in zip(slots, of_slots, strict=True)},
        variance,
        Ranks.of(variance, of_trainer),
        num_batches=num_steps,
        commit_s=profile.numbers.commit_s,
        keeps_events=keeps_events,
    )


def with_stops(outcome: Outcome, variance: Variance, num_devices: int, *, refill_s: float = 0.0) -> Outcome:
    """The run with stops, one for a failure of any of so many devices; `refill_s` as for `stopped_step_s`."""
    if variance.failures is None:
        return outcome
    step_s = variance.failures.stopped_step_s(outcome.step_s, num_devices, refill_s=refill_s)
    return replace(outcome, step_s=step_s, stopped=1 - outcome.step_s / step_s)


def varied_baselines(profile: Profile, pools: Sequence[Pool], variance: Variance) -> list[Outcome]:
    """Runs of `baselines` with variance, verl-omni's way before them, and each with TSP from a shared queue, too."""
    runs = pools_in_turns(profile, pools)
    everything = runs[0].pool
    outcomes = [run_varied_verl_omni(profile, everything, variance, devices=runs[0].devices)]
    for pool, devices, first_device in runs:
        phases = Phases(variance, profile.numbers, pool.num_devices, first_device, everything.num_devices)
        for has_tsp, has_queue in ((False, False), (True, False), (True, True)):
            outcomes.append(
                run_varied_colocated(profile, pool, phases, has_tsp=has_tsp, has_queue=has_queue, devices=devices)
            )
    return outcomes


def run_varied_colocated(
    profile: Profile,
    pool: Pool,
    phases: Phases,
    *,
    has_tsp: bool,
    has_queue: bool = False,
    devices: str | None = None,
) -> Outcome:
    """Simulate a baseline with variance; formulas and arguments as for `run_colocated`, over `NUM_STEPS` steps."""
    numbers, slowdown = profile.numbers, pool.slowdown(profile.device)
    steps: list[Parts] = []
    busy_s = 0.0
    for step in range(NUM_STEPS):
        generated = phases.generate(step, sample_s(numbers, slowdown), has_queue=has_queue)
        training_s = phases.call_s(
            lambda slow: train_s(
                numbers, numbers.num_prompts, pool.num_devices, slowdown=slowdown * slow, has_tsp=has_tsp
            ),
            "train",
            phases.first_group(step),
        )
        steps.append(
            (
                ("generate", generated.generate_s),
                ("score", generated.score_s),
                ("switch", numbers.switch_s),
                ("train", training_s),
                ("commit", numbers.commit_s),
            )
        )
        busy_s += (generated.busy_s + training_s + numbers.commit_s) / NUM_STEPS
    name = SHARED_QUEUE if has_queue else COLOCATED_TSP if has_tsp else COLOCATED
    outcome = turns_outcome(profile, pool, name, steps, busy_s=busy_s, devices=devices)
    return with_stops(outcome, phases.variance, pool.num_devices)


def run_varied_verl_omni(
    profile: Profile,
    pool: Pool,
    variance: Variance,
    way: Way = VERL_OMNI,
    reward: Reward = "in turns",
    *,
    devices: str | None = None,
) -> Outcome:
    """Simulate a step as verl-omni runs it, with variance; formulas and arguments as for `run_verl_omni`.

    The reward model's work in turns is shared out by the speed of the devices.
    """
    numbers, slowdown = profile.numbers, pool.slowdown(profile.device)
    phases = Phases(variance, numbers, pool.num_devices)
    num_samples = numbers.num_prompts * numbers.group_size
    generate_s = way.generation_factor * sample_s(numbers, slowdown)

    def replayed_s(kind: str, group: int, samples: int, in_batch: int, forward_s: float, num_gathers: int) -> float:
        one_s = forward_s * way.replay_factor * slowdown
        return phases.call_s(
            lambda slow: replay_s(numbers, samples, pool, in_batch, one_s * slow, num_gathers), kind, group
        )

    steps: list[Parts] = []
    busy_s = 0.0
    for step in range(NUM_STEPS):
        first = phases.first_group(step)
        generated = phases.generate(step, generate_s)
        scoring_s = phases.shared_s(num_samples * way.reward_s * slowdown, "reward", first)
        scoring_s = scoring_s if reward == "in turns" else 0.0
        training_s, group = 0.0, first
        if way.log_prob_samples:
            training_s += replayed_s("log-probs", first, num_samples, way.log_prob_samples, numbers.step_s, 1)
        for prompts in even_parts(numbers.num_prompts, way.num_updates):
            in_update = prompts * numbers.group_size
            training_s += replayed_s("train", group, in_update, way.samples_per_micro_batch, numbers.row_s, 2)
            training_s += numbers.commit_s
            group += prompts
        steps.append(
            (
                ("generate", generated.generate_s),
                ("score", generated.score_s + scoring_s),
                ("switch", numbers.switch_s * way.switch_factor),
                ("train", training_s),
            )
        )
        busy_s += (generated.busy_s + scoring_s + training_s) / NUM_STEPS
    outcome = turns_outcome(profile, pool, NAME, steps, busy_s=busy_s, devices=devices)
    return with_stops(outcome, variance, pool.num_devices)
