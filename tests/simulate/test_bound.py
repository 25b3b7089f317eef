# SPDX-License-Identifier: Apache-2.0
"""A lower bound of a step by hand, and against simulated schedules, none of which beats it."""

import random
from collections.abc import Collection
from dataclasses import replace

import pytest

from tests.simulate.test_cluster import NUMBERS as CLUSTERS
from verl_digen.hardware.devices import PEAK_TFLOPS, Pool
from verl_digen.schedulers.rules import BatchRules
from verl_digen.tools.simulate.cluster import Split, assist_s, ladder, run_split, sample_s, train_s
from verl_digen.tools.simulate.profile import Profile, load_profile, profile_names

EVERYTHING = ("gap", "tsp", "tag", "tcss")
ROUNDING = 1e-9
NUMBERS = replace(
    CLUSTERS,
    **dict(num_prompts=2, group_size=5, num_steps=4, num_trained_steps=3, min_trainer_devices=1),
    **dict(min_gathering_devices=1, step_s=0.5, decode_s=0.0, row_s=0.2, gather_s=0.0),
    **dict(score_s=0.1, commit_s=0.0, switch_s=0.0),
)


def lower_bound_s(profile: Profile, trainer: Pool, generator: Pool, techniques: Collection[str]) -> float:
    """Lower bound of a step's seconds with `techniques`, a subset of `schedulers.simulation.TECHNIQUES`: nobody waits.

        train = training of the whole batch in one call + commit_s        on the trainer's ranks; with even tiles,
                                                                          several smaller calls never take less
        step >= train                                                     no other pool trains
        step >= P*G * sample_s / slots                                    if the trainer never generates
        step >= t with  t / sample_s * slots  +  (t - train) / assist_s * c  =  P*G
                                                                          if it generates, c samples at a time,
                                                                          whenever it does not train

    It bounds the mean step of any window that generates at least as many samples as it trains, or is charged for the
    missing ones (`run_split`). c is a size that `digen.tag.chunk_size=auto` gives.

    Example: 10 samples of 2 s on 2 slots, 6 s of training and commit -> 10 s; with "tag" and a trainer that generates a
    sample in 2 s, 8.67 s: the slots generate 8.67 of them, the trainer the rest in its 2.67 s of idle time.
    """
    numbers = profile.numbers
    slowdown = trainer.slowdown(profile.device)
    training_s = numbers.commit_s + train_s(
        numbers, numbers.num_prompts, trainer.num_devices, slowdown=slowdown, has_tsp="tsp" in techniques
    )
    num_samples = numbers.num_prompts * numbers.group_size
    samples_per_s = generator.num_devices / sample_s(numbers, generator.slowdown(profile.device))
    if "tag" not in techniques or num_samples / samples_per_s <= training_s:
        return max(training_s, num_samples / samples_per_s)
    rules = BatchRules(
        numbers.num_prompts,
        numbers.group_size,
        max_chunk_size=numbers.max_chunk_size,
        num_trainer_ranks=trainer.num_devices,
    )
    assisted_per_s = max(
        count / assist_s(numbers, count, trainer.num_devices, slowdown)
        for count in rules.assist_sizes(generator.num_devices)
    )
    return (num_samples + training_s * assisted_per_s) / (samples_per_s + assisted_per_s)


def test_by_hand():
    """10 samples of 2 s on 2 slots; 30 rows of 0.2 s on one rank, which also generates a sample in 2 s."""
    profile, one, two = Profile("p", "m", "s", "H800", NUMBERS), Pool(1, "H800"), Pool(2, "H800")
    assert lower_bound_s(profile, one, two, ("gap", "tsp")) == pytest.approx(10.0)
    assert lower_bound_s(profile, one, two, EVERYTHING) == pytest.approx((10 + 6 / 2) / (2 / 2 + 1 / 2))
    slow = Profile("p", "m", "s", "H800", replace(NUMBERS, row_s=0.5, commit_s=1.0))
    assert lower_bound_s(slow, one, two, EVERYTHING) == pytest.approx(30 * 0.5 + 1.0), "training cannot be shared"


def test_assists_count_with_the_samples_that_all_ranks_make_together():
    """5 ranks generate 5 samples in 2 s; training takes 6 rows of 0.2 s on each."""
    profile = Profile("p", "m", "s", "H800", NUMBERS)
    bound_s = lower_bound_s(profile, Pool(5, "H800"), Pool(1, "H800"), EVERYTHING)
    assert bound_s == pytest.approx((10 + 1.2 * 2.5) / (0.5 + 2.5))


@pytest.mark.parametrize("has_tsp", [True, False])
def test_one_call_trains_a_batch_in_the_least_time_however_it_is_cut(has_tsp):
    rng = random.Random(0)
    for _ in range(300):
        numbers = replace(
            NUMBERS,
            group_size=rng.randint(2, 12),
            num_trained_steps=rng.randint(1, 9),
            rows_per_tile=rng.randint(1, 8),
            gather_s=rng.uniform(0.0, 0.8),
        )
        num_ranks, num_prompts = rng.randint(1, 12), rng.randint(2, 6)
        calls_s = [train_s(numbers, n, num_ranks, slowdown=1.0, has_tsp=has_tsp) for n in range(1, num_prompts + 1)]
        cheapest_s = [0.0]
        for count in range(1, num_prompts + 1):
            cheapest_s.append(min(calls_s[first - 1] + cheapest_s[count - first] for first in range(1, count + 1)))
        assert calls_s[-1] == pytest.approx(cheapest_s[-1], rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_no_simulated_schedule_beats_it(seed):
    rng = random.Random(seed)
    profile = load_profile(rng.choice(profile_names()))
    devices = [device for device in PEAK_TFLOPS if device != "CPU"]
    trainer = Pool(rng.randint(profile.numbers.min_trainer_devices, 48), rng.choice(devices))
    split = Split(trainer, Pool(rng.randint(1, 48), rng.choice(devices)))
    for techniques in ladder(EVERYTHING):
        outcome = run_split(profile, split, techniques, num_steps=12)
        bound_s = lower_bound_s(profile, split.trainer, split.generator, techniques)
        assert outcome.step_s >= bound_s * (1 - ROUNDING), techniques
