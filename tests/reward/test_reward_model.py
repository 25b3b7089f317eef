# SPDX-License-Identifier: Apache-2.0
"""Rewards that ask verl's reward model get its addresses, and no other does."""

import asyncio

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn

from tests.reward.samples import make_sample
from verl_digen.config.reward import reward_entry
from verl_digen.reward.manager import DiffusionRewardManager
from verl_digen.reward.reward_model import ServedModel, asks_reward_model, connected

SERVED = ServedModel(("10.0.0.1:8000", "[fd00::1]:8000"), "10.0.0.9:9000")
HERE = "tests.reward.test_reward_model"


async def routed(data_source, solution_image, ground_truth, extra_info=None, *, reward_router_address):
    return float(reward_router_address == SERVED.router)


def scores_of(functions, custom):
    """Values of a sample by the functions and the user's own."""
    config = OmegaConf.create({"digen": {"reward": {"functions": functions}}})
    manager = DiffusionRewardManager(config, custom, SERVED.router)
    found = asyncio.run(manager.score([*functions, "custom"], [make_sample()]))
    return {name: score.value for name, (score,) in found.items()}


def plain(data_source, solution_image, ground_truth, extra_info=None):
    return 0.25


ASKING = [("yes_no", 1.0), ("yes_no", {"weight": 1.0, "url": "reward_model"}), ("mine", f"{HERE}:routed")]
OTHERS = [("shapes", 1.0), ("diversity", 1.0), ("yes_no", {"weight": 1.0, "url": "http://h:1"}), ("m", f"{HERE}:plain")]


def entry_of(name, value):
    return reward_entry(name, {"weight": 1.0, "reward": value} if isinstance(value, str) else value)


@pytest.mark.parametrize("name, value", ASKING)
def test_a_judge_without_url_and_a_function_with_the_routers_name_ask(name, value):
    assert asks_reward_model(entry_of(name, value))


@pytest.mark.parametrize("name, value", OTHERS)
def test_other_rewards_do_not_ask_and_stay_as_they_are(name, value):
    entry = entry_of(name, value)
    assert not asks_reward_model(entry) and connected(entry, SERVED) == entry


def test_a_judge_gets_every_servers_address():
    entry = reward_entry("yes_no", {"weight": 1.0, "max_px": 64})
    assert connected(entry, SERVED).arguments == {
        "max_px": 64,
        "url": ["http://10.0.0.1:8000", "http://[fd00::1]:8000"],
    }
    assert connected(entry, None) is entry


@pytest.mark.parametrize("is_async", [True, False])
def test_the_users_own_function_gets_the_router_through_verls_wrapper(tmp_path, is_async):
    head = "def compute_score(solution_image, extra_info=None, *, reward_router_address, scale, **more):"
    (tmp_path / "own.py").write_text(f"{'async ' * is_async}{head} return scale * len(reward_router_address)")
    section = {"path": str(tmp_path / "own.py"), "name": "compute_score", "reward_kwargs": {"scale": 2.0}}
    custom = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": section}}))
    assert scores_of({}, custom) == {"custom": 2.0 * len(SERVED.router)}


def test_functions_get_the_router_and_the_users_own_too():
    functions = {
        "mine": {"weight": 1.0, "reward": f"{HERE}:routed"},
        "plain": {"weight": 1.0, "reward": f"{HERE}:plain"},
    }
    assert scores_of(functions, routed) == {"mine": 1.0, "plain": 0.25, "custom": 1.0}
