# SPDX-License-Identifier: Apache-2.0
"""Runs with variance, next to the exact ones: equal without variance, by hand with one kind of it."""

from dataclasses import replace
from statistics import fmean

import pytest

from verl_digen.devices import Pool
from verl_digen.simulate.cluster import SHARED_QUEUE, Split, baselines, ladder, run_colocated, run_split
from verl_digen.simulate.costs import sample_s, train_s
from verl_digen.simulate.phases import NUM_STEPS, Phases
from verl_digen.simulate.profile import load_profile, profile_names
from verl_digen.simulate.variance import Failures, SlowDevices, Variance
from verl_digen.simulate.varied import run_varied_colocated, run_varied_split, run_varied_verl_omni, varied_baselines
from verl_digen.simulate.verl_omni import run_verl_omni

TECHNIQUES = ("gap", "tsp", "tag", "tcss")
FLUX = load_profile("flux1-12b")
POOL = Pool(32, "H800")
FEW = Failures(2e-5)


def h800(trainer: int, generator: int) -> Split:
    return Split(Pool(trainer, "H800"), Pool(generator, "H800"))


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("split", [h800(20, 12), h800(11, 20)], ids=str)
def test_separate_pools_without_variance_are_the_exact_run(name, split):
    profile = load_profile(name)
    for chosen in ladder(TECHNIQUES):
        exact = run_split(profile, split, chosen, num_steps=8, keeps_events=True)
        varied = run_varied_split(profile, split, chosen, Variance(seed=7), num_steps=8, keeps_events=True)
        assert varied.events == exact.events and varied.window_s == exact.window_s
        assert varied.step_s == pytest.approx(exact.step_s, rel=1e-12) and varied.idle == exact.idle
        assert (varied.assisted, varied.stale) == (exact.assisted, exact.stale)


@pytest.mark.parametrize("pools", [[POOL], [Pool(30, "H800")], [Pool(20, "H800"), Pool(24, "A100")]], ids=str)
def test_colocated_runs_without_variance_are_the_exact_ones(pools):
    for name in profile_names():
        profile = load_profile(name)
        varied = varied_baselines(profile, pools, Variance(seed=7))
        queued = [run for run in varied if run.name == SHARED_QUEUE]
        alone = [run for run in varied[1:] if run.name != SHARED_QUEUE]
        exact = baselines(profile, pools)
        assert [(run.name, run.devices) for run in alone] == [(run.name, run.devices) for run in exact]
        assert [run.step_s for run in alone] == pytest.approx([run.step_s for run in exact], rel=1e-12)
        assert [run.idle["all"] for run in alone] == pytest.approx([run.idle["all"] for run in exact], abs=1e-12)
        tsp_s = [run.step_s for run in exact if run.name == "colocated+tsp"]
        assert [run.step_s for run in queued] == pytest.approx(tsp_s, rel=1e-12)
        omni = run_verl_omni(
            profile, Pool(varied[0].num_devices, max(pools, key=lambda pool: pool.device == "A100").device)
        )
        assert varied[0].step_s == pytest.approx(omni.step_s, rel=1e-12) and varied[0].name == omni.name


def test_a_colocated_step_with_skew_alone_by_hand():
    variance = Variance(rank_skew=0.2, seed=5)
    exact = run_colocated(FLUX, POOL, has_tsp=True)
    run = run_varied_colocated(FLUX, POOL, Phases(variance, FLUX.numbers, 32), has_tsp=True)
    training_s = train_s(FLUX.numbers, 32, 32, slowdown=1.0, has_tsp=True)
    # one call a step, of the step's 32 groups
    factor = fmean(variance.slowest(32, "train", 32 * step, 1.0) for step in range(NUM_STEPS))
    assert run.step_s == pytest.approx(exact.step_s + training_s * (factor - 1), rel=1e-12)
    assert factor > 1.3


def test_a_slow_device_is_waited_for_by_hand():
    """372 samples on 32 devices: 11 or 12 on each, one at a time; the last one takes twice as long for its 11."""
    slow, numbers = Variance(slow=SlowDevices(1, 32), seed=1), replace(FLUX.numbers, num_prompts=31)
    profile, phases = replace(FLUX, numbers=numbers), Phases(slow, numbers, 32)
    assert phases.slow_factors == [1.0] * 31 + [2.0]
    run = run_varied_colocated(profile, POOL, phases, has_tsp=True)
    training_s = train_s(numbers, 31, 32, slowdown=2.0, has_tsp=True)
    rest_s = numbers.score_s + numbers.switch_s + training_s + numbers.commit_s
    assert run.step_s == pytest.approx(22 * sample_s(numbers, 1.0) + rest_s, rel=1e-12)
    # from a queue it takes 6 of them while 31 others take 366, 11 or 12 each
    queued = run_varied_colocated(profile, POOL, phases, has_tsp=True, has_queue=True)
    assert queued.step_s == pytest.approx(12 * sample_s(numbers, 1.0) + rest_s, rel=1e-12)


def test_a_slow_device_among_those_that_generate_costs_separate_pools_less_than_one_that_trains():
    split, chosen = h800(20, 12), TECHNIQUES[:3]
    exact_s = run_split(FLUX, split, chosen, num_steps=10).step_s
    generates = Variance(slow=SlowDevices(1, 32, place="generator"))
    assert run_varied_split(FLUX, split, chosen, generates, num_steps=10).step_s < 1.05 * exact_s
    trains = Variance(slow=SlowDevices(1), seed=2)
    assert 2.0 in trains.slow_factors(32)[:20]
    assert run_varied_split(FLUX, split, chosen, trains, num_steps=10).step_s > 1.5 * exact_s


def test_stops_take_the_share_that_the_formula_says_and_colocated_runs_have_more_of_them():
    split, variance = h800(20, 12), Variance(failures=FEW)
    exact = run_split(FLUX, split, TECHNIQUES[:3], num_steps=8)
    run = run_varied_split(FLUX, split, TECHNIQUES[:3], variance, num_steps=8)
    assert run.num_deaths == 0
    assert run.step_s == pytest.approx(FEW.stopped_step_s(exact.step_s, 20), rel=1e-12)
    assert run.stopped == pytest.approx(1 - exact.step_s / run.step_s, rel=1e-9) and run.bound_s is None
    colocated = run_varied_colocated(FLUX, POOL, Phases(variance, FLUX.numbers, 32), has_tsp=True)
    assert colocated.step_s == pytest.approx(FEW.stopped_step_s(run_colocated(FLUX, POOL, has_tsp=True).step_s, 32))
    omni = run_varied_verl_omni(FLUX, POOL, variance)
    assert omni.step_s == pytest.approx(FEW.stopped_step_s(run_verl_omni(FLUX, POOL).step_s, 32))


def test_a_stop_of_a_run_that_is_ahead_costs_what_was_ahead():
    wan, split = load_profile("wan2.1-14b"), h800(20, 12)
    exact = run_split(wan, split, TECHNIQUES, num_steps=12)
    run = run_varied_split(wan, split, TECHNIQUES, Variance(failures=Failures(1e-3)), num_steps=12)
    assert exact.stale > 0.5 and run.num_deaths == 0
    assert run.step_s > Failures(1e-3).stopped_step_s(exact.step_s, 20)


def test_replicas_that_die_are_counted_and_make_a_step_longer():
    failures = Failures(3.0, replace_s=60.0, save_freq=1, restart_s=0.0)
    split, chosen = h800(24, 8), TECHNIQUES[:2]
    exact_s = run_split(FLUX, split, chosen, num_steps=20).step_s
    run = run_varied_split(FLUX, split, chosen, Variance(failures=failures, seed=1), num_steps=20)
    assert run.num_deaths > 2 and run.step_s * (1 - run.stopped) > exact_s


def test_the_same_seed_gives_the_same_runs_and_jitter_costs_both_sides():
    variance, split = Variance(jitter=0.2, rank_skew=0.05, seed=2), h800(20, 12)

    def runs(variance: Variance) -> list[float]:
        separate = run_varied_split(FLUX, split, TECHNIQUES, variance, num_steps=10)
        return [separate.step_s, *(run.step_s for run in varied_baselines(FLUX, [POOL], variance))]

    assert runs(variance) == runs(replace(variance))
    assert all(one != other for one, other in zip(runs(variance), runs(replace(variance, seed=3)), strict=True))
    exact = [run_split(FLUX, split, TECHNIQUES, num_steps=10), run_verl_omni(FLUX, POOL), *baselines(FLUX, [POOL])]
    assert all(varied > run.step_s for varied, run in zip(runs(variance), exact, strict=False))


def test_verl_omni_waits_in_all_of_its_phases():
    """Skew slows the log-prob pass and both updates, whose draws are those of their first groups."""
    variance = Variance(rank_skew=0.2, seed=5)
    exact, run = run_verl_omni(FLUX, POOL), run_varied_verl_omni(FLUX, POOL, variance)
    exact_s = [
        sum(event.end_s - event.start_s for event in exact.events if event.what == what)
        for what in ("train", "generate")
    ]
    varied_s = [
        sum(event.end_s - event.start_s for event in run.events if event.what == what) for what in ("train", "generate")
    ]
    assert varied_s[1] == pytest.approx(exact_s[1]) and 1.3 < varied_s[0] / exact_s[0] < 1.7
