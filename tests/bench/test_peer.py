# SPDX-License-Identifier: Apache-2.0
"""verl-omni's way on our own engine: its mode, the window of all modes, and devices of rewards."""

from argparse import ArgumentParser

import pytest

from verl_digen.bench import command
from verl_digen.bench.command import RECIPE
from verl_digen.bench.modes import MODES
from verl_digen.bench.peer import SAME_WINDOW, compose_bench, peer_mode
from verl_digen.config import digen_config
from verl_digen.devices import Pool
from verl_digen.pool_sizes import num_reward_devices
from verl_digen.simulate.profile import load_profile
from verl_digen.simulate.verl_omni import NAME, run_verl_omni


def setup_of(*arguments: str) -> command.BenchSetup:
    parser = ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(arguments)
    return command._setup(args, command._modes(args))


def test_its_settings_are_accepted_and_are_those_of_the_published_recipe():
    config = compose_bench((RECIPE,), (*SAME_WINDOW, *peer_mode(8).overrides))
    digen = digen_config(config)
    assert (digen.window.kind, digen.window.size) == ("consecutive", 2)
    assert (digen.tsp.extents, digen.tsp.reduce) == ((16, 1), "tile")
    assert digen.old_log_probs == "recompute" and digen.rollout.max_batch_size == 1
    actor = config.actor_rollout_ref.actor
    assert config.data.train_batch_size == 2 * actor.ppo_mini_batch_size and actor.ppo_epochs == 1


def test_with_peer_every_mode_trains_its_window_and_it_is_a_mode_more():
    setup = setup_of("--peer", "--modes", "colocated,gap", "--", "data.train_batch_size=6")
    assert setup.work.overrides == (*SAME_WINDOW, "data.train_batch_size=6"), "the user's own win"
    assert setup.peer is not None and setup.peer.name == NAME and not setup.peer.is_disaggregated
    assert "actor_rollout_ref.actor.ppo_mini_batch_size=3" in setup.peer.overrides
    assert set(MODES["colocated"].overrides) <= set(setup.peer.overrides)
    without = setup_of("--modes", "colocated")
    assert without.peer is None and without.work.overrides == () and NAME not in MODES


def test_devices_of_rewards_count_for_every_mode():
    assert setup_of("--modes", "colocated").num_devices == 2
    reward = "digen.reward.functions={shapes: {weight: 1.0, num_workers: 3, num_gpus: 1}}"
    setup = setup_of("--modes", "colocated,gap", "--", reward)
    assert (setup.num_reward_devices, setup.split.num_devices, setup.num_devices) == (3, 2, 5)
    assert num_reward_devices(compose_bench((RECIPE,), (reward,))) == 3


def test_on_virtual_devices_it_is_simulated_with_the_profiles_window():
    setup = setup_of(
        "--virtual", "qwen-image-20b", "--trainer", "2", "--generator", "2", "--peer", "--time-scale", "0.1"
    )
    expected_s = run_verl_omni(load_profile("qwen-image-20b"), Pool(4, "H800")).step_s
    assert setup.peer is None and setup.peer_s == pytest.approx(0.1 * expected_s)
    assert NAME not in {baseline.name for baseline in setup.baselines}
    assert setup_of("--virtual", "qwen-image-20b").peer_s is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_batch_size=7", "data.train_batch_size must be a multiple of 2 prompts with --peer.*got 7"),
        ("digen.nothing=7", "the config cannot be composed: .*nothing"),
    ],
)
def test_what_cannot_run_is_told_before_anything_runs(override, message):
    with pytest.raises(ValueError, match=message):
        setup_of("--peer", "--", override)
