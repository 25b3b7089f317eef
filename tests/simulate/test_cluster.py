# SPDX-License-Identifier: Apache-2.0
"""Cluster runs: the formulas by hand, the order of techniques, the search over splits, and speed."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from verl_digen.simulate.cluster import Split, best_split, ladder, run_colocated, run_split
from verl_digen.simulate.costs import assist_s, sample_s, train_s
from verl_digen.simulate.devices import Pool, parse_pool
from verl_digen.simulate.profile import Numbers, Profile, load_profile, profile_names

NUMBERS = Numbers(
    num_prompts=4,
    group_size=8,
    num_steps=10,
    num_trained_steps=9,
    max_chunk_size=8,
    rows_per_tile=4,
    min_trainer_devices=2,
    step_s=0.1,
    decode_s=0.5,
    row_s=0.4,
    gather_s=0.3,
    score_s=0.2,
    commit_s=1.0,
    switch_s=2.0,
)
PROFILE = Profile("p", "a model", "a setting", "H800", NUMBERS, {})
TECHNIQUES = ("gap", "tsp", "tag", "tcss")


def h800(trainer: int, generator: int) -> Split:
    return Split(Pool(trainer, "H800"), Pool(generator, "H800"))


def test_training_time_by_hand():
    # serial: 8 samples on 16 ranks, one each on 8 of them, 9 rows of max(0.4, 2 * 0.3 * 15 / 16)
    assert train_s(NUMBERS, 1, 16, slowdown=1.0, has_tsp=False) == pytest.approx(9 * 0.5625)
    # TSP: 72 rows on 16 ranks, 5 rows at most, a tile of 4 and one of 1
    assert train_s(NUMBERS, 1, 16, slowdown=1.0, has_tsp=True) == pytest.approx(4 * 0.4 + 0.5625)
    # one rank gathers nothing
    assert train_s(NUMBERS, 1, 1, slowdown=1.0, has_tsp=False) == pytest.approx(72 * 0.4)
    assert train_s(NUMBERS, 1, 1, slowdown=1.0, has_tsp=True) == pytest.approx(72 * 0.4)
    # a device half as fast computes twice as long, and gathers as fast
    assert train_s(NUMBERS, 1, 16, slowdown=2.0, has_tsp=True) == pytest.approx(4 * 0.8 + 0.8)


def test_generation_time_by_hand():
    assert sample_s(NUMBERS, 1.0) == pytest.approx(10 * 0.1 + 0.5)
    # sharded weights arrive slower than they are used: 0.3 * 3 / 4 > 0.1
    assert assist_s(NUMBERS, 4, 1.0) == pytest.approx(10 * 0.225 + 0.5)
    assert assist_s(NUMBERS, 1, 1.0) == sample_s(NUMBERS, 1.0)


def test_a_colocated_step_by_hand():
    # 32 samples on 16 devices: 2 rounds of 1.5 s; 0.2; 2.0; 2 samples of 9 rows of 0.5625 s each; 1.0
    run = run_colocated(PROFILE, Pool(16, "H800"), has_tsp=False)
    assert run.step_s == pytest.approx(3.0 + 0.2 + 2.0 + 18 * 0.5625 + 1.0)
    assert run.idle["all"] == pytest.approx(2.2 / run.step_s)


def test_a_barrier_step_by_hand():
    # 32 samples in chunks of one on 8 slots: 4 rounds of 1.5 s; scores 0.2; 32 samples on 8 ranks, 4 each of 9 rows
    run = run_split(PROFILE, h800(8, 8), (), num_steps=5)
    row_s = max(0.4, 0.6 * 7 / 8)
    assert run.step_s == pytest.approx(6.0 + 0.2 + 4 * 9 * row_s + 1.0)
    assert run.idle["generator"] == pytest.approx(1 - 6.0 / run.step_s)
    assert run.idle["trainer"] == pytest.approx(6.2 / run.step_s)


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("num_trainer", [8, 16, 24])
def test_no_technique_makes_a_step_longer_with_a_shipped_profile(name, num_trainer):
    profile = load_profile(name)
    runs = [
        run_split(profile, h800(num_trainer, 32 - num_trainer), chosen, num_steps=6) for chosen in ladder(TECHNIQUES)
    ]
    assert [run.name for run in runs] == ["barrier", "gap", "gap+tsp", "gap+tsp+tag", "gap+tsp+tag+tcss"]
    for slow, fast in pairwise(runs):
        assert fast.step_s <= slow.step_s * (1 + 1e-9), (slow.name, fast.name)
    assert runs[-1].step_s < 0.9 * runs[0].step_s
    for run in runs:
        assert all(0 <= share <= 1 for share in run.idle.values())
        assert (run.stale > 0) <= ("tcss" in run.name)
        assert (run.assisted > 0) <= ("tag" in run.name)


def test_a_trainer_that_has_time_assists_where_generation_is_short():
    profile = load_profile("hunyuanvideo-13b")
    without, with_tag = (
        run_split(profile, h800(24, 8), chosen, num_steps=6) for chosen in (("gap", "tsp"), ("gap", "tsp", "tag"))
    )
    assert with_tag.assisted > 0.1
    assert with_tag.step_s < 0.9 * without.step_s


def test_the_best_split_is_the_best_of_all():
    every = {
        trainer: run_split(PROFILE, h800(trainer, 12 - trainer), ("gap", "tsp"), num_steps=5).step_s
        for trainer in range(2, 12)
    }
    found = best_split(PROFILE, Pool(12, "H800"), ("gap", "tsp"), num_steps=5)
    assert every[found.trainer.num_devices] == min(every.values())


def test_a_slower_device_type_takes_longer():
    slow = Split(Pool(8, "H800"), Pool(8, "H20"))
    fast = run_split(PROFILE, h800(8, 8), (), num_steps=5)
    assert run_split(PROFILE, slow, (), num_steps=5).step_s - fast.step_s == pytest.approx(6.0 * (989 / 148 - 1))


def test_1024_devices_for_100_steps_take_less_than_10_seconds():
    profile = load_profile("qwen-image-20b")
    profile = replace(profile, numbers=replace(profile.numbers, num_prompts=128))
    start_s = time.process_time()
    run = run_split(profile, h800(896, 128), TECHNIQUES, num_steps=100)
    assert time.process_time() - start_s < 10
    assert run.num_samples == 2048 and run.step_s > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run_split(PROFILE, h800(1, 8), (), num_steps=5), "--trainer must be >= 2 devices.*got 1"),
        (lambda: run_split(PROFILE, h800(2, 8), (), num_steps=2), "--steps must be > 2.*got 2"),
        (lambda: run_split(PROFILE, h800(2, 8), ("gap", "x"), num_steps=5), "--techniques must be among.*got 'x'"),
        (lambda: best_split(PROFILE, Pool(2, "H800"), (), num_steps=5), "--devices must be > 2.*got 2"),
        (lambda: parse_pool("--trainer", "many", default_device="H800"), "--trainer must be a number.*got 'many'"),
        (lambda: parse_pool("--trainer", "8xTPU", default_device="H800"), "--trainer must name a device.*got 'TPU'"),
        (lambda: parse_pool("--trainer", "0", default_device="H800"), "--trainer must be >= 1 device, got 0"),
    ],
)
def test_bad_input_is_told_by_its_option(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_pool_is_written_as_it_is_read():
    assert str(parse_pool("--trainer", "16xH20", default_device="H800")) == "16xH20"
    assert parse_pool("--trainer", "16", default_device="H800") == Pool(16, "H800")
