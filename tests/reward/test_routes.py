# SPDX-License-Identifier: Apache-2.0
"""Rewards that score some samples alone: those of validations, those of some data sources."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn

from tests.reward.samples import Handle, make_sample
from tests.tags import make_tag
from verl_digen.algorithms.advantages import combined_advantages
from verl_digen.config import DigenConfig, RewardConfig
from verl_digen.config.reward import reward_entry
from verl_digen.observe.metrics import reward_metrics
from verl_digen.reward.combine import formula
from verl_digen.reward.manager import DiffusionRewardManager, RewardProcess
from verl_digen.reward.reward_model import ServedModel, asks_reward_model, connected
from verl_digen.reward.sample_rewards import SHARED, SampleRewards
from verl_digen.trainer.updates import group_rewards
from verl_digen.types import PartScore, RewardCall

GOLD = {"weight": 0, "gold": True, "reward": "diversity"}
"""A gold reward of groups."""
NAMED = {
    "jpeg": {"weight": 1.0, "reward": "jpeg_compressibility", "data_sources": ["photo"]},
    "log": {"weight": 0.0, "reward": "jpeg_incompressibility"},
    "text": {"weight": 2.0, "reward": "diversity", "data_sources": ["ocr"]},
    "pool": {"weight": 0.5, "reward": "jpeg_compressibility", "num_workers": 1, "data_sources": ["ocr", "photo"]},
    "gold": GOLD,
}


class Counting(RewardProcess):
    """A worker that counts its calls; a function gives 1, a pool 10."""

    def __init__(self, pool: str):
        self._value, self.calls = (1.0 if pool == SHARED else 10.0), list[Any]()

    async def score_one(self, names: Any, samples: Any) -> Any:
        self.calls.append(names)
        call = RewardCall(names[0], 0.0, 1.0, len(samples), 0)
        return {name: [PartScore(self._value, {}, call) for _ in samples] for name in names}


def score(source: str, *, is_validation: bool, combine: str = "sum", named: Any = None):
    """(score of the first sample of a group of two, calls per pool)."""
    digen = DigenConfig(reward=RewardConfig(NAMED if named is None else named, combine=combine))
    workers = {pool: Counting(pool) for pool in (SHARED, "text", "pool", "gold")}

    async def run():
        handles = {pool: [Handle(worker)] for pool, worker in workers.items()}
        rewards = SampleRewards(handles, digen.reward.weights(has_custom=False), digen)
        samples = [make_sample(index) for index in range(2)]
        samples = [
            replace(one, row=replace(one.row, data_source=source), is_validation=is_validation) for one in samples
        ]
        scored = await asyncio.gather(*(rewards.score(one, version=0, group_size=2) for one in samples))
        return scored[0][0]

    return asyncio.run(run()), {pool: worker.calls for pool, worker in workers.items()}


def test_a_gold_reward_scores_no_training_sample_and_every_validation_sample():
    trained, calls = score("photo", is_validation=False)
    assert "gold" not in trained.parts and calls["gold"] == []
    validated, calls = score("photo", is_validation=True)
    assert validated.parts["gold"] == 10.0 and len(calls["gold"]) == 1
    assert validated.total == trained.total, "it weighs nothing"


def test_a_source_is_scored_by_its_own_rewards_alone():
    photo, calls = score("photo", is_validation=False)
    assert set(photo.parts) == {"jpeg", "log", "pool"} and calls["text"] == []
    assert calls[SHARED] == [("jpeg", "log")] * 2 and photo.total == 1.0 + 0.5 * 10
    ocr, calls = score("ocr", is_validation=False)
    assert set(ocr.parts) == {"log", "text", "pool"} and calls[SHARED] == [("log",)] * 2
    assert ocr.total == 2.0 * 10 + 0.5 * 10, "weights are not normalised"


def test_a_sample_that_no_function_scores_calls_no_function_worker():
    named = {name: value for name, value in NAMED.items() if name != "log"}
    found, calls = score("ocr", is_validation=False, named=named)
    assert calls[SHARED] == [] and found.total == 25.0


def test_a_combination_sees_the_rewards_that_scored_the_sample(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def count(values, weights):\n    assert values.keys() == weights.keys()\n    return len(values)\n")
    for source, num_trained in (("photo", 2), ("ocr", 2), ("other", 0)):
        assert score(source, is_validation=True, combine=f"{path}:count")[0].total == num_trained


def test_gdpo_normalises_the_rewards_that_a_group_has():
    digen = DigenConfig(reward=RewardConfig({"a": 1.0, "b": {"weight": 3.0, "data_sources": ["x"]}}, combine="gdpo"))
    config = OmegaConf.create({"reward": {"custom_reward_function": {"path": None}}})
    of_group = group_rewards(config, digen)
    both = [make_tag(parts={"a": value, "b": -value}) for value in (1.0, 2.0)]
    alone = [make_tag(parts={"a": value}) for value in (1.0, 2.0)]
    assert of_group(alone) == combined_advantages({"a": [1.0, 2.0]}, {"a": 1.0})
    assert of_group(both) == combined_advantages({"a": [1.0, 2.0], "b": [-1.0, -2.0]}, {"a": 1.0, "b": 3.0})


def test_a_metric_is_the_mean_over_the_samples_that_have_the_part():
    found = reward_metrics([make_tag(parts={"a": 1.0, "b": 4.0}), make_tag(uid="p1", parts={"a": 3.0})])
    assert (found["reward/a"], found["reward/b"]) == (2.0, 4.0)


def test_the_formula_says_when_and_for_what_a_reward_is_computed():
    entries = RewardConfig(NAMED).entries
    weights = {entry.name: entry.weight for entry in entries}
    assert formula(weights, "sum", entries) == (
        "reward = 1 x jpeg [photo] + 2 x text [ocr] + 0.5 x pool [ocr, photo] (only logged: log; only at validation: "
        "gold (gold))"
    )


def test_gold_means_validation_unless_when_says_otherwise():
    assert reward_entry("x", GOLD).when == "validation" and reward_entry("x", 0.0).when == "always"
    assert reward_entry("x", GOLD | {"when": "always"}).scores("any", is_validation=False)
    late = reward_entry("x", {"weight": 0, "when": "validation"})
    assert not late.is_gold and not late.scores("any", is_validation=False) and late.scores("any", is_validation=True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"weight": 1, "gold": True}, "weight must be 0 with digen.reward.functions.x.gold=true: a gold reward is not"),
        ({"weight": 0, "gold": 1}, "x.gold must be true or false, got 1"),
        ({"weight": 0, "when": "never"}, "x.when must be always or validation, got 'never'"),
        ({"weight": 2, "when": "validation"}, "x.when must be always where digen.reward.functions.x.weight=2 is not 0"),
        ({"weight": 1, "data_sources": "ocr"}, "x.data_sources must be a list of different names, got 'ocr'"),
        ({"weight": 1, "data_sources": []}, "x.data_sources must be a list of different names, got []"),
        ({"weight": 1, "data_sources": ["a", "a"]}, "x.data_sources must be a list of different names, got ['a', 'a']"),
    ],
)
def test_an_entry_without_sense_is_refused_with_its_key(value, message):
    with pytest.raises(ValueError) as refused:
        reward_entry("x", value)
    assert message in str(refused.value)


# -- rewards that ask verl's reward model get its addresses, and no other does -------------------------------
SERVED = ServedModel(("10.0.0.1:8000", "[fd00::1]:8000"), "10.0.0.9:9000")
HERE = "tests.reward.test_routes"


async def routed(data_source, solution_image, ground_truth, extra_info=None, *, reward_router_address):
    return float(reward_router_address == SERVED.router)


def scores_of(functions, custom):
    """Values of a sample by the functions and the user's own."""
    config = OmegaConf.create({"digen": {"reward": {"functions": functions}}})
    manager = DiffusionRewardManager(config, custom, SERVED.router)
    found = asyncio.run(manager.score_one([*functions, "custom"], [make_sample()]))
    return {name: score.value for name, (score,) in found.items()}


def plain(data_source, solution_image, ground_truth, extra_info=None):
    return 0.25


ASKING = [("yes_no", 1.0), ("yes_no", {"weight": 1.0, "url": "reward_model"}), ("mine", f"{HERE}:routed")]
OTHERS = [
    ("jpeg_compressibility", 1.0),
    ("diversity", 1.0),
    ("yes_no", {"weight": 1.0, "url": "http://h:1"}),
    ("m", f"{HERE}:plain"),
]


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
