# SPDX-License-Identifier: Apache-2.0
"""verl-omni's way: a step by hand, the published steps, and the way back to a plain colocated run."""

from dataclasses import fields, replace

import pytest

from tests.simulate.test_cluster import NUMBERS, PROFILE
from verl_digen.devices import Pool
from verl_digen.simulate.cluster import baselines, run_colocated
from verl_digen.simulate.comparison import without_overheads
from verl_digen.simulate.profile import load_profile, profile_names
from verl_digen.simulate.verl_omni import (
    LOGGED_PARTS,
    NAME,
    PUBLISHED,
    SOURCE_OF,
    SOURCES,
    VERL_OMNI,
    WINDOW,
    Way,
    run_verl_omni,
    simulated_step_s,
    step_parts,
    windowed,
)

NEUTRAL = Way(
    num_updates=1,
    samples_per_micro_batch=1,
    log_prob_samples=0,
    generation_factor=1.0,
    replay_factor=1.0,
    switch_factor=1.0,
    reward_s=0.0,
)
"""A way that takes nothing more than a colocated run."""

QWEN = load_profile("qwen-image-20b")
LORA = [step for step in PUBLISHED if step.is_fitted]


def test_a_step_by_hand():
    """Qwen-Image on 4 devices: 128 samples on each, 64 in each of two updates, two timesteps."""
    generate_s = 128 * (10 * 0.08409 + 0.01259) * 226.4 / 107.9
    score_s = 0.2 + 512 * 0.47 / 4
    log_probs_s = 2 * 4 * 32 * 0.08409 * 1.4  # 4 forwards of 32 samples for each timestep; a gather takes 0.19 s
    update_s = 2 * 4 * 16 * 0.2523 * 1.4 + 0.00406  # 4 forwards and backwards of 16 samples for each timestep
    switch_s = 10.2
    run = run_verl_omni(windowed(QWEN, 2), Pool(4, "H800"))
    assert run.step_s == pytest.approx(generate_s + score_s + log_probs_s + 2 * update_s + switch_s)
    assert run.step_s == pytest.approx(420, rel=0.05)
    assert run.idle["all"] == pytest.approx((switch_s + 0.2) / run.step_s)
    assert (run.name, run.num_devices, run.num_samples, run.split) == (NAME, 4, 512, None)
    assert run.samples_per_device_s == pytest.approx(0.305, rel=0.01)


def test_a_step_by_hand_where_micro_batches_are_not_full_and_gathers_take_longer_than_computing():
    """32 samples of 4 prompts on 16 devices: one on each in both updates, 0.3 * 15 / 16 s a gather."""
    way = replace(NEUTRAL, num_updates=2, samples_per_micro_batch=16, log_prob_samples=3, reward_s=0.5)
    parts = step_parts(PROFILE, Pool(16, "H800"), way)
    assert parts["log-probs"] == pytest.approx(9 * 0.28125)  # two samples of 0.1 s take less
    assert parts["updates"] == pytest.approx(2 * (9 * 0.5625 + 1.0))  # one of 0.4 s takes less than two gathers
    assert parts["score"] == pytest.approx(0.2 + 32 * 0.5 / 16)
    assert parts["generate"] == pytest.approx(2 * 1.5)
    # 20 samples in micro-batches of 16 and 4, on one device, which gathers nothing
    alone = replace(PROFILE, numbers=replace(NUMBERS, num_prompts=1, group_size=20))
    assert step_parts(alone, Pool(1, "H800"), way)["updates"] == pytest.approx(9 * 20 * 0.4 + 1.0)


@pytest.mark.parametrize("published", LORA, ids=lambda step: step.name)
def test_the_published_steps_come_out_within_5_percent(published):
    assert published.step_s in (420.0, 360.0)
    assert simulated_step_s(QWEN, published) == pytest.approx(published.step_s, rel=0.05)


def test_two_numbers_are_fitted_and_they_are_those_that_give_the_published_steps():
    """A step is affine in both: solve for them from the parts that are not fitted."""
    fitted = {name for name, source in SOURCE_OF.items() if source.startswith("fitted:")}
    assert fitted == {"replay_factor", "reward_s"} and len(LORA) == 2
    in_turns, elsewhere = LORA
    zero = replace(VERL_OMNI, replay_factor=0.0, reward_s=0.0)
    # without gathers, as there none takes longer than computing
    bare = replace(QWEN, numbers=replace(QWEN.numbers, gather_s=0.0))
    rest_s = simulated_step_s(bare, elsewhere, zero)
    replay_s = simulated_step_s(bare, elsewhere, replace(zero, replay_factor=1.0)) - rest_s
    assert VERL_OMNI.replay_factor == pytest.approx((elsewhere.step_s - rest_s) / replay_s, abs=0.005)
    assert VERL_OMNI.reward_s == pytest.approx((in_turns.step_s - elsewhere.step_s) * 4 / 512, abs=0.005)


def test_every_number_has_a_source():
    assert list(SOURCE_OF) == [field.name for field in fields(Way)]
    assert all(source.startswith(SOURCES) for source in SOURCE_OF.values())


def test_generation_and_the_logged_parts_agree_without_being_fitted():
    """Parts of the logged step, to which nothing was fitted."""
    assert sum(LOGGED_PARTS.values()) == pytest.approx(408.8)
    parts = step_parts(windowed(QWEN, WINDOW), Pool(4, "H800"))
    assert parts["generate"] == pytest.approx(LOGGED_PARTS["generate"], rel=0.01)
    assert parts["log-probs"] == pytest.approx(LOGGED_PARTS["log-probs"], rel=0.06)
    assert parts["switch"] == pytest.approx(LOGGED_PARTS["switch"])


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("num_devices", [1, 7, 32, 256])
@pytest.mark.parametrize("device", ["H800", "A100"])
@pytest.mark.parametrize("window", [1, WINDOW, 9])
def test_a_way_that_takes_nothing_more_is_a_colocated_run(name, num_devices, device, window):
    profile, pool = windowed(load_profile(name), window), Pool(num_devices, device)
    found, plain = run_verl_omni(profile, pool, NEUTRAL), run_colocated(profile, pool, has_tsp=False)
    assert found.step_s == pytest.approx(plain.step_s)
    assert found.idle["all"] == pytest.approx(plain.idle["all"])
    switchless = replace(profile, numbers=replace(profile.numbers, switch_s=0.0))
    assert run_verl_omni(profile, pool, replace(NEUTRAL, switch_factor=0.0)).step_s == pytest.approx(
        run_colocated(switchless, pool, has_tsp=False).step_s
    )


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("num_devices", [3, 32, 256])
def test_no_overhead_makes_a_step_shorter(name, num_devices):
    profile, pool = load_profile(name), Pool(num_devices, "H800")
    times = [run_verl_omni(profile, pool, way, reward).step_s for _, way, reward in without_overheads()]
    assert times == sorted(times, reverse=True)
    # what is left is a colocated run in larger micro-batches
    assert times[-1] <= run_colocated(profile, pool, has_tsp=False).step_s * (1 + 1e-9)


def test_every_overhead_of_the_way_is_taken_away_in_the_end():
    ladder = without_overheads()
    assert ladder[0][1:] == (VERL_OMNI, "in turns")
    last, reward = ladder[-1][1:]
    sizes = {name: getattr(VERL_OMNI, name) for name in ("samples_per_micro_batch", "reward_s")}
    assert reward == "elsewhere" and last == replace(NEUTRAL, **sizes)


def test_the_published_way_is_no_baseline_of_ours():
    """A comparison with a handicapped run would flatter: `digen simulate` compares with the fastest one."""
    assert NAME not in {run.name for run in baselines(QWEN, [Pool(4, "H800")])}


def test_a_window_longer_than_a_sample_is_refused():
    assert windowed(QWEN, 2).numbers.num_trained_steps == 2
    assert windowed(QWEN, 2).numbers == replace(QWEN.numbers, num_trained_steps=2)
    with pytest.raises(ValueError, match=r"trained steps must lie in \[1, 10\].*got 11"):
        windowed(QWEN, 11)
