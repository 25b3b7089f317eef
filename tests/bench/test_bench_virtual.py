# SPDX-License-Identifier: Apache-2.0
"""What a profile asks of a virtual run, and what is predicted for it."""

import pytest

from verl_digen.algorithms.window import WindowConfig, draw_window
from verl_digen.bench.modes import MODES
from verl_digen.bench.virtual import predict, virtual_overrides, virtual_split
from verl_digen.simulate.cluster import run_colocated, run_split
from verl_digen.simulate.devices import Pool
from verl_digen.simulate.profile import load_profile, profile_names


@pytest.mark.parametrize("name", profile_names())
def test_the_run_is_given_the_batch_and_the_window_of_the_profile(name):
    profile = load_profile(name)
    split = virtual_split(profile, Pool(20, "H800"), Pool(12, "H20"))
    given = dict(override.split("=", 1) for override in virtual_overrides(profile, name, split, 0.05))
    numbers = profile.numbers
    assert given["digen.virtual.profile"] == name and given["digen.virtual.time_scale"] == "0.05"
    assert given["digen.virtual.trainer_ranks"] == "20"
    assert (given["digen.virtual.trainer_device"], given["digen.virtual.generator_device"]) == ("H800", "H20")
    assert given["actor_rollout_ref.rollout.n_gpus_per_node"] == "12"
    assert int(given["data.train_batch_size"]) == numbers.num_prompts
    assert int(given["actor_rollout_ref.rollout.n"]) == numbers.group_size
    kind = given["digen.window.kind"]
    config = WindowConfig(kind=kind, fraction=float(given["digen.window.fraction"]) if kind == "fraction" else 0.5)
    window = draw_window(config, run_seed=3, uid="p1", num_steps=int(given["digen.sampling.num_steps"]), step=0)
    assert len(window.train_steps) == numbers.num_trained_steps


def test_the_prediction_is_the_simulators_scaled():
    profile = load_profile("wan2.1-14b")
    split = virtual_split(profile, Pool(16, "H800"), Pool(16, "H800"))
    for name, techniques in (("barrier", ()), ("gap", ("gap",)), ("gap+tsp", ("gap", "tsp"))):
        simulated = run_split(profile, split, techniques, num_steps=8)
        prediction = predict(profile, split, MODES[name], 0.1)
        assert prediction.step_s == pytest.approx(0.1 * simulated.step_s)
        assert prediction.bound_s == pytest.approx(0.1 * simulated.bound_s)
        colocated = run_colocated(profile, Pool(32, "H800"), has_tsp=False)
        assert prediction.colocated_s == pytest.approx(0.1 * colocated.step_s)
    mixed = virtual_split(profile, Pool(16, "H800"), Pool(16, "H20"))
    assert predict(profile, mixed, MODES["gap"], 0.1).colocated_s is None


def test_a_trainer_too_small_for_the_model_is_refused():
    with pytest.raises(ValueError, match=r"--trainer must be >= 5 devices.*got 4"):
        virtual_split(load_profile("hunyuanvideo-13b"), Pool(4, "H800"), Pool(28, "H800"))
