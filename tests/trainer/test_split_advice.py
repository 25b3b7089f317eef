# SPDX-License-Identifier: Apache-2.0
"""Advice on the split, against runs of the simulator whose durations are known."""

from dataclasses import replace
from functools import cache

import pytest

from verl_digen.devices import Pool
from verl_digen.observe.step_costs import StepParts
from verl_digen.schedulers.simulation import Event
from verl_digen.simulate.cluster import Split, run_split, simulated_rules
from verl_digen.simulate.costs import assist_s, sample_s
from verl_digen.simulate.profile import load_profile, profile_names
from verl_digen.simulate.splits import Limits, placed_splits
from verl_digen.trainer.split_advice import NOISES, Setting, advice_line, advise, noise, profile_of

NUM_STEPS = 8
STRICT, STALE = ("gap", "tsp", "tag"), ("gap", "tsp", "tag", "tcss")


def h800(trainer: int, generator: int) -> Split:
    return Split(Pool(trainer, "H800"), Pool(generator, "H800"))


def setting_of(profile, split: Split, techniques, nodes=None) -> Setting:
    numbers = profile.numbers
    return Setting(
        split,
        {"H800": [8] * (split.num_devices // 8)} if nodes is None else nodes,
        Limits(),
        simulated_rules(profile, split, techniques),
        num_steps=numbers.num_steps,
        num_rows=numbers.num_trained_steps,
    )


def measured_steps(profile, split: Split, techniques, factors=()) -> list[StepParts]:
    """Steps of a simulated run, as a timeline would tell them; step i takes `factors[i]` times as long."""
    numbers = profile.numbers
    outcome = run_split(profile, split, techniques, num_steps=NUM_STEPS, keeps_events=True)
    slow = split.generator.slowdown(profile.device)
    num_ranks = split.trainer.num_devices
    steps = []
    for number in range(2, NUM_STEPS - 1):
        own = [
            event
            for event in outcome.events
            if numbers.num_prompts * number <= event.ids[0] < numbers.num_prompts * (number + 1)
        ]
        chunk_of = {
            round(assist_s(numbers, count, num_ranks, split.trainer.slowdown(profile.device)), 9): count
            for count in range(numbers.max_chunk_size * num_ranks, 0, -1)
        }
        factor = factors[len(steps) % len(factors)] if factors else 1.0
        commits = [event for event in outcome.events if event.what == "commit" and event.ids == (number,)]
        steps.append(
            StepParts(
                outcome.step_s * factor,
                _length(commits[0]),
                chunks=[
                    (round(_length(event) / sample_s(numbers, slow)), _length(event))
                    for event in own
                    if event.what == "generate"
                ],
                assists=[
                    (chunk_of[round(_length(event), 9)], _length(event)) for event in own if event.what == "assist"
                ],
                fragments=[
                    (len(event.ids) * numbers.group_size, _length(event)) for event in own if event.what == "train"
                ],
                scores_s=[_length(event) for event in own if event.what == "score"],
            )
        )
    return steps


def _length(event: Event) -> float:
    return event.end_s - event.start_s


@cache
def every_split_s(name: str, num_devices: int, techniques) -> dict[Split, float]:
    """Simulated seconds of all splits that are allowed, with the true durations."""
    profile = load_profile(name)
    (family,) = placed_splits({"H800": [8] * (num_devices // 8)}, Limits())
    least = profile.numbers.min_trainer_devices
    return {
        placed.split: run_split(profile, placed.split, techniques, num_steps=6).step_s
        for placed in family
        if placed.split.trainer.num_devices >= least
    }


@pytest.mark.parametrize(
    "techniques",
    [pytest.param(("gap", "tsp"), marks=pytest.mark.long), STRICT, pytest.param(STALE, marks=pytest.mark.long)],
    ids="+".join,
)
@pytest.mark.parametrize("name", profile_names())
def test_a_bad_split_is_told_the_best_one_and_a_good_one_nothing(name, techniques):
    profile, seconds = load_profile(name), every_split_s(name, 32, techniques)
    best_s = min(seconds.values())
    num_advised = 0
    chosen = {min(seconds, key=lambda split: seconds[split]), *list(seconds)[1::8]}  # each simulates all the others
    for split in chosen:
        step_s = seconds[split]
        advice = advise(setting_of(profile, split, techniques), measured_steps(profile, split, techniques))
        if step_s > 1.1 * best_s:
            assert advice is not None, (str(split), step_s / best_s)
        if step_s < 1.03 * best_s:
            assert advice is None, (str(split), str(advice))
        if advice is not None:
            num_advised += 1
            true_s = seconds[advice.placed.split]
            assert true_s <= 1.03 * best_s, (str(split), str(advice.placed.split))
            assert advice.expected_s == pytest.approx(true_s, rel=0.1)
    assert num_advised >= 2


def bad_run(factors=()):
    profile, split = load_profile("qwen-image-20b"), h800(4, 28)
    return setting_of(profile, split, STRICT), measured_steps(profile, split, STRICT, factors)


def test_a_gain_within_the_noise_of_the_steps_is_not_told():
    """The gain of 16 + 16 is 1.3 or so; the median stays, and steps on either side lie far from it."""
    profile, split = load_profile("qwen-image-20b"), h800(8, 24)
    setting = setting_of(profile, split, STRICT)
    gain = advise(setting, measured_steps(profile, split, STRICT)).gain
    for spread in (0.01, 0.1, 0.3, 0.6, 0.9):
        noisy = measured_steps(profile, split, STRICT, (1.0, 1 - spread, 1 + spread, 1 - spread, 1 + spread))
        doubt = NOISES * noise([step.step_s for step in noisy])
        assert (advise(setting, noisy) is None) == (gain <= 1 + doubt), spread
    assert doubt > gain - 1, "the largest spread hides the gain"


def test_one_slow_step_changes_neither_the_noise_nor_the_advice():
    _, quiet = bad_run()
    setting, once_slow = bad_run((1.0, 1.0, 1.0, 1.0, 10.0))
    assert noise([step.step_s for step in once_slow]) == 0.0
    assert advise(setting, once_slow) == advise(setting, quiet)


def test_time_that_the_simulation_does_not_know_is_not_gained():
    setting, plain = bad_run()
    known = advise(setting, plain)
    extra_s = 5.0
    with_more = advise(setting, [replace(step, step_s=step.step_s + extra_s) for step in plain])
    assert with_more.placed == known.placed
    assert with_more.expected_s == pytest.approx(known.expected_s + extra_s)
    # a simulation that is off by more than what it promises promises nothing
    far_off = [replace(step, step_s=step.step_s * 20) for step in plain]
    assert advise(setting, far_off) is None


def test_of_two_types_the_faster_one_is_told_to_train():
    profile = load_profile("qwen-image-20b")
    split = Split(Pool(16, "A100"), Pool(16, "H800"))
    nodes = {"A100": [8, 8], "H800": [8, 8]}
    advice = advise(setting_of(profile, split, STRICT, nodes), measured_steps(profile, split, STRICT))
    assert str(advice.placed.split) == "16xH800 + 16xA100"
    assert advice.overrides[-2:] == [
        "digen.placement.trainer_accelerator=H800",
        "digen.placement.generator_accelerator=A100",
    ]
    true_s = run_split(profile, advice.placed.split, STRICT, num_steps=6).step_s
    assert advice.expected_s == pytest.approx(true_s, rel=0.1)


def test_replicas_of_several_devices_and_slots_have_the_speed_of_their_devices():
    setting, steps = bad_run()
    one = profile_of(setting, steps).numbers.step_s
    limits = replace(setting.limits, replica_devices=4)
    assert profile_of(replace(setting, limits=limits), steps).numbers.step_s == pytest.approx(4 * one)
    assert profile_of(replace(setting, slots_per_replica=2), steps).numbers.step_s == pytest.approx(one / 2)


def test_the_line_names_words_gain_and_the_way_to_resume():
    advice = advise(*bad_run())
    line = advice_line(advice, saves=True)
    shapes = f"trainer.nnodes={advice.placed.trainer.nnodes} trainer.n_gpus_per_node={advice.placed.trainer.per_node}"
    assert f"trainer.resume_mode=auto {shapes} actor_rollout_ref.rollout.nnodes=" in line
    assert f"{advice.gain:.2f} times as fast" in line and "4xH800 + 28xH800" in line and "\n" not in line
    assert "resume_mode" not in advice_line(advice, saves=False)
    assert "writes no checkpoint (trainer.save_freq)" in advice_line(advice, saves=False)
