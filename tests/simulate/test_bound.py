# SPDX-License-Identifier: Apache-2.0
"""The bound by hand, and that no simulated schedule beats it."""

import random
from dataclasses import replace

import pytest

from verl_digen.simulate.bound import lower_bound_s
from verl_digen.simulate.cluster import Split, best_split, ladder, run_split
from verl_digen.simulate.devices import PEAK_TFLOPS, Pool
from verl_digen.simulate.profile import Numbers, Profile, load_profile, profile_names

EVERYTHING = ("gap", "tsp", "tag", "tcss")
NUMBERS = Numbers(
    num_prompts=2,
    group_size=5,
    num_steps=4,
    num_trained_steps=3,
    max_chunk_size=8,
    rows_per_tile=4,
    min_trainer_devices=1,
    step_s=0.5,
    decode_s=0.0,
    row_s=0.2,
    gather_s=0.0,
    score_s=0.1,
    commit_s=0.0,
    switch_s=0.0,
)


def test_by_hand():
    """10 samples of 2 s on 2 slots; 30 rows of 0.2 s on one rank, which makes a sample in 2 s as well."""
    profile, one, two = Profile("p", "m", "s", "H800", NUMBERS, {}), Pool(1, "H800"), Pool(2, "H800")
    assert lower_bound_s(profile, one, two, ("gap", "tsp")) == pytest.approx(10.0)
    assert lower_bound_s(profile, one, two, EVERYTHING) == pytest.approx((10 + 6 / 2) / (2 / 2 + 1 / 2))
    slow = Profile("p", "m", "s", "H800", replace(NUMBERS, row_s=0.5, commit_s=1.0), {})
    assert lower_bound_s(slow, one, two, EVERYTHING) == pytest.approx(30 * 0.5 + 1.0), "training cannot be shared"


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_beats_it(seed):
    rng = random.Random(seed)
    profile = load_profile(rng.choice(profile_names()))
    devices = [device for device in PEAK_TFLOPS if device != "CPU"]
    trainer = Pool(rng.randint(profile.numbers.min_trainer_devices, 48), rng.choice(devices))
    split = Split(trainer, Pool(rng.randint(1, 48), rng.choice(devices)))
    for techniques in ladder(EVERYTHING):
        outcome = run_split(profile, split, techniques, num_steps=12)
        assert outcome.bound_s is not None and outcome.step_s >= 0.97 * outcome.bound_s  # ends of the steady window


@pytest.mark.parametrize("num_devices", [16, 32])
@pytest.mark.parametrize("name", profile_names())
def test_with_everything_on_the_best_split_comes_close(name, num_devices):
    profile = load_profile(name)
    split = best_split(profile, Pool(num_devices, profile.device), EVERYTHING, num_steps=10)
    outcome = run_split(profile, split, EVERYTHING, num_steps=10)
    assert outcome.bound_s is not None and outcome.step_s < 1.05 * outcome.bound_s
