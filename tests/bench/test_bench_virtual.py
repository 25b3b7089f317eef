# SPDX-License-Identifier: Apache-2.0
"""Overrides that a profile gives a virtual run, and the prediction for it."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

import verl_digen.trainer.register  # noqa: F401 - the order in which verl imports us
from verl_digen.algorithms.window import WindowConfig, draw_window
from verl_digen.bench.modes import MODES
from verl_digen.bench.virtual import predict, simulated_baselines, virtual_overrides, virtual_split
from verl_digen.config import digen_config
from verl_digen.devices import Pool
from verl_digen.simulate.cluster import run_colocated, run_split, simulated_rules
from verl_digen.simulate.profile import load_profile, profile_names
from verl_digen.trainer.batch_rules import batch_rules
from verl_digen.virtual.trainer import VirtualTrainer

ONE_RANK = (
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1",
)


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


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("mode", ["barrier", "gap+tsp", "gap+tsp+tag", "gap+tsp+tag+tcss"])
def test_the_run_plans_with_the_rules_that_are_simulated_and_these_are_the_defaults(name, mode):
    profile = load_profile(name)
    split = virtual_split(profile, Pool(20, "H800"), Pool(12, "H800"))
    given = (*MODES[mode].overrides, *virtual_overrides(profile, name, split, 1.0))
    yaml_reads_as_false = "digen.tag.policy=off"  # Hydra does not, and it is the default
    own = [override for override in given if override.startswith("digen.") and override != yaml_reads_as_false]
    settings = OmegaConf.from_dotlist(own)
    numbers = profile.numbers
    rules = batch_rules(
        digen_config(settings),
        num_prompts=numbers.num_prompts,
        group_size=numbers.group_size,
        num_trainer_ranks=split.trainer.num_devices,
    )
    simulated = simulated_rules(profile, split, MODES[mode].techniques)
    refills = {name: getattr(rules, name) for name in ("max_group_refills", "max_sample_refills")}  # none is needed
    assert rules == replace(simulated, **refills)
    trainer = object.__new__(VirtualTrainer)
    trainer.digen, trainer.config = digen_config(settings), OmegaConf.from_dotlist([*given, *ONE_RANK])
    assert trainer._rules() == rules, "not those of the one process that stands for the ranks"
    assert rules.assist_sizes(12)[0] == 20, "every rank of the trainer has a sample"
    planning = ("digen.gap.", "digen.tag.", "digen.queue.", "digen.staleness.")
    others = [override for override in virtual_overrides(profile, name, split, 1.0) if override.startswith(planning)]
    assert others == ["digen.gap.slots_per_replica=1"], "a virtual device takes no time between two chunks"


def test_the_prediction_is_the_simulators_scaled():
    profile = load_profile("wan2.1-14b")
    split = virtual_split(profile, Pool(16, "H800"), Pool(16, "H800"))
    for name, techniques in (("barrier", ()), ("gap", ("gap",)), ("gap+tsp", ("gap", "tsp"))):
        simulated = run_split(profile, split, techniques, num_steps=8)
        prediction = predict(profile, split, MODES[name], 0.1)
        assert prediction.step_s == pytest.approx(0.1 * simulated.step_s)
        assert prediction.bound_s == pytest.approx(0.1 * simulated.bound_s)


def test_the_baselines_are_the_simulators_scaled():
    profile = load_profile("wan2.1-14b")
    split = virtual_split(profile, Pool(16, "H800"), Pool(16, "H800"))
    found = {baseline.name: baseline.step_s for baseline in simulated_baselines(profile, split, 0.1)}
    together = Pool(32, "H800")
    assert found == {
        "colocated, 32xH800 together": pytest.approx(0.1 * run_colocated(profile, together, has_tsp=False).step_s),
        "colocated+tsp, 32xH800 together": pytest.approx(0.1 * run_colocated(profile, together, has_tsp=True).step_s),
        "barrier, 16xH800 + 16xH800": pytest.approx(0.1 * run_split(profile, split, (), num_steps=5).step_s),
    }
    mixed = virtual_split(profile, Pool(16, "H800"), Pool(16, "H20"))
    names = [baseline.name for baseline in simulated_baselines(profile, mixed, 0.1)]
    assert "colocated+tsp, 32 together, as H20" in names and "colocated+tsp, 16xH800 alone" in names


def test_a_trainer_too_small_for_the_model_is_refused():
    with pytest.raises(ValueError, match=r"--trainer must be >= 5 devices.*got 4"):
        virtual_split(load_profile("hunyuanvideo-13b"), Pool(4, "H800"), Pool(28, "H800"))
