# SPDX-License-Identifier: Apache-2.0
"""All rewards of a run, as an agent loop worker asks them: functions, pools, groups, and how they are combined."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.reward.samples import make_sample
from verl_digen.config import DigenConfig, PoolSettings, RewardConfig
from verl_digen.config.reward import reward_entry
from verl_digen.errors import RunStopped
from verl_digen.reward.combine import formula
from verl_digen.reward.layout import RewardLayout
from verl_digen.reward.named import check, make, settings
from verl_digen.reward.pool_worker import BatchScorer
from verl_digen.reward.sample_rewards import ROW, SampleRewards
from verl_digen.reward.scorers import diversity
from verl_digen.reward.scoring import ScoringError
from verl_digen.types import SampleLatents

MINE = """
from verl_digen.reward.base import Reward


class Bright(Reward):
    def score(self, batch):
        return [{"score": float(sample.pixels.mean()), "red": 1.0} for sample in batch]


class Final(Reward):
    @classmethod
    def reads_latents(cls, arguments):
        return True

    def score(self, batch):
        return [float(sample.latents.final.mean()) for sample in batch]


class Blind(Reward):
    def score(self, batch):
        return [float(sample.latents is not None) for sample in batch]


class Broken(Reward):
    def score(self, batch):
        if not all(sample.pixels.any() for sample in batch):
            raise OSError("the picture is black")
        return [1.0] * len(batch)


def smaller(values, weights):
    return min(weights[name] * value for name, value in values.items())


def not_a_number(values, weights):
    return float("nan")
"""


class Handle:
    """A worker's handle whose calls run in this process."""

    def __init__(self, worker: Any):
        self.compute_score = SimpleNamespace(remote=lambda data: asyncio.ensure_future(worker(data)))


async def functions(data: Any) -> dict[str, Any]:
    """The function workers' answer: the prompt's length, weighted by 0.5."""
    value = float(len(data.non_tensor_batch[ROW][0].text))
    return {"reward_score": 0.5 * value, "reward_extra_info": {"length": value}, "calls": ()}


def pool_handle(digen: DigenConfig, name: str) -> Handle:
    entry = next(entry for entry in digen.reward.entries if entry.name == name)
    pool = PoolSettings(batch_wait_s=0.0)
    scorer = BatchScorer(
        name,
        make(entry, torch.device("cpu")),
        max_retries=digen.reward.max_retries,
        timeout_s=60.0,
        max_batch_size=pool.max_batch_size,
        batch_wait_s=pool.batch_wait_s,
    )
    return Handle(scorer.score)


@pytest.fixture
def mine(tmp_path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def rewards_of(digen: DigenConfig) -> SampleRewards:
    """Rewards with a worker for `length` and one for each entry."""
    entries = digen.reward.entries
    layout = RewardLayout(1, entries, {"length": 0.5, **digen.reward.weights(has_custom=False)})
    return SampleRewards(layout, [Handle(functions), *(pool_handle(digen, entry.name) for entry in entries)], digen)


def score_group(digen: DigenConfig, size: int = 2) -> list[Any]:
    """Outcomes of the samples of one group, the pictures of which are 0, 100, 200, ..."""

    async def run() -> list[Any]:
        rewards = rewards_of(digen)
        asked = [
            rewards.score(make_sample(index, value=100 * index), version=0, group_size=size) for index in range(size)
        ]
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(run())


def test_the_reward_is_the_weighted_sum_over_functions_pools_and_groups(mine):
    named = {"bright": {"weight": 2.0, "reward": f"{mine}:Bright"}, "diversity": {"weight": 0.0}}
    digen = DigenConfig(reward=RewardConfig(named))
    for index, (score, (start_s, end_s)) in enumerate(score_group(digen)):
        assert score.total == 0.5 * len("a cat") + 2.0 * 100 * index
        assert score.parts == {
            "length": 5.0,
            "bright": 100.0 * index,
            "bright/red": 1.0,
            "diversity": pytest.approx(100 / 255),
        }
        assert [call.reward for call in score.calls] == ["bright", "diversity"] and start_s <= end_s


def test_latents_reach_the_rewards_that_read_them_and_no_other(mine):
    named = {"final": {"weight": 1.0, "reward": f"{mine}:Final"}, "blind": {"weight": 1.0, "reward": f"{mine}:Blind"}}
    digen = DigenConfig(reward=RewardConfig(named))
    sample = replace(make_sample(), latents=SampleLatents(torch.full((2, 3, 3), 7.0), {}))

    async def run() -> Any:
        rewards = rewards_of(digen)
        assert rewards.reads_latents
        return await rewards.score(sample, version=0, group_size=1)

    score, _ = asyncio.run(run())
    assert score.parts == {"length": 5.0, "final": 7.0, "blind": 0.0}


def test_a_function_of_ones_own_combines_the_trained_rewards(mine):
    named = {"bright": {"weight": 0.01, "reward": f"{mine}:Bright"}, "diversity": {"weight": 0.0}}
    reward = RewardConfig(named, combine=f"{mine}:smaller")
    found = [score.total for score, _ in score_group(DigenConfig(reward=reward))]
    assert found == [0.0, 1.0], "min(0.5 x 5, 0.01 x value)"
    broken = RewardConfig(named, combine=f"{mine}:not_a_number")
    (stopped, _) = score_group(DigenConfig(reward=broken))
    assert isinstance(stopped, RunStopped) and "digen.reward.combine must return a finite number, got nan" in str(
        stopped
    )


def test_a_reward_that_fails_on_one_sample_leaves_none_of_its_group_waiting(mine):
    named = {"broken": {"weight": 1.0, "reward": f"{mine}:Broken"}, "diversity": {"weight": 1.0}}
    failed, *others = score_group(DigenConfig(reward=RewardConfig(named, max_retries=0)), size=3)
    assert isinstance(failed, ScoringError) and "last with OSError: the picture is black" in str(failed)
    for one in others:
        assert isinstance(one, ScoringError) and "sample 0 of its group has no reward: reward 'broken'" in str(one)


def test_the_workers_are_the_functions_and_then_each_pools():
    pools = (reward_entry("a", {"weight": 1, "num_workers": 2}), reward_entry("b", 1.0))
    layout = RewardLayout(3, pools, {})
    assert layout.split([1, 2, 3, 4, 5, 6]) == ([1, 2, 3], [[4, 5], [6]])
    with pytest.raises(RuntimeError, match="have 6 workers, got 5"):
        layout.split([1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("combine", "expected"),
    [
        ("sum", "reward = 0.7 x ocr + 0.3 x pick (only logged: gold)"),
        (
            "gdpo",
            "advantage = 0.7 x A(ocr) + 0.3 x A(pick), each reward normalised in its group (only logged: gold)",
        ),
        ("mine.smaller", "reward = mine.smaller(ocr, pick) (only logged: gold)"),
    ],
)
def test_the_formula_says_what_is_trained_on(combine, expected):
    assert formula({"ocr": 0.7, "gold": 0.0, "pick": 0.3}, combine) == expected


def test_diversity_is_the_mean_distance_to_the_other_pictures():
    reward = make(reward_entry("diversity", 1.0), torch.device("cpu"))
    batch = [make_sample(index, value=value) for index, value in enumerate((0, 0, 255))]
    assert reward.score(batch) == pytest.approx([0.5, 0.5, 1.0])
    video = [diversity.RewardInput(np.stack([one.pixels] * 3), one.row, one.sample_index) for one in batch]
    assert reward.score(video) == pytest.approx([0.5, 0.5, 1.0])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("diversity", {"weight": 1, "size_px": 0}, "diversity: size_px must be >= 1, got 0; 32 is the default"),
        ("shapes", {"weight": 1, "scale": 2}, "take the other names out of the entry's arguments"),
        (
            "x",
            {"weight": 1, "reward": "collections.OrderedDict"},
            "must be a class of verl_digen.reward.base.Reward or a",
        ),
    ],
)
def test_arguments_that_a_reward_does_not_take_are_refused_with_its_key(name, value, message):
    with pytest.raises(ValueError) as refused:
        check(reward_entry(name, value))
    assert message in str(refused.value)


def test_the_arguments_of_an_entry_are_the_settings_of_its_class():
    entry = reward_entry("few", {"weight": 1, "reward": "diversity", "size_px": 8, "num_gpus": 0.5})
    assert settings(entry, check(entry)) == diversity.DiversityConfig(8)
    assert entry.pool == PoolSettings(num_gpus=0.5)
