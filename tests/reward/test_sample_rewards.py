# SPDX-License-Identifier: Apache-2.0
"""All rewards of a run, as an agent loop worker asks them: functions, pools, groups, and how they are combined."""

import asyncio
import re
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from ray.exceptions import ActorUnavailableError

from tests.reward.samples import Handle, make_sample
from verl_digen.config import DigenConfig, PoolSettings, RewardConfig
from verl_digen.config.reward import reward_entry
from verl_digen.errors import RunStopped
from verl_digen.inputs.audio import Audio
from verl_digen.reward.combine import formula
from verl_digen.reward.functions import call_arguments
from verl_digen.reward.manager import (
    DiffusionRewardLoopWorker,
    DiffusionRewardManager,
    RewardPoolWorker,
    RewardProcess,
    samples_of,
)
from verl_digen.reward.named import check, check_packages, check_rows, make
from verl_digen.reward.sample_rewards import SHARED, SampleRewards
from verl_digen.reward.scorers import diversity
from verl_digen.reward.scoring import ScoringError
from verl_digen.types import PartScore, PromptRow, RewardCall, SampleLatents

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


class Tagged(Blind):
    @classmethod
    def check_row(cls, arguments, row):
        assert row.extra["tag"]


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


class Lengths(RewardProcess):
    """Worker of the functions: the prompt's length."""

    async def score_one(self, names: Any, samples: Any) -> Any:
        call = RewardCall("length", 0.0, 1.0, 1, 0)
        return {name: [PartScore(float(len(one.row.text)), {}, call) for one in samples] for name in names}


@pytest.fixture
def mine(tmp_path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def rewards_of(digen: DigenConfig) -> SampleRewards:
    """Rewards with a worker for `length`, of weight 0.5, and one for each entry."""
    config = OmegaConf.create({"digen": {"reward": asdict(digen.reward)}})
    pools = {entry.name: [Handle(RewardPoolWorker(config, entry.name))] for entry in digen.reward.entries}
    weights = {"length": 0.5, **digen.reward.weights(has_custom=False)}
    return SampleRewards({SHARED: [Handle(Lengths())], **pools}, weights, digen)


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
        assert [call.reward for call in score.calls] == ["length", "bright", "diversity"] and start_s <= end_s


class Places(RewardProcess):
    """Worker of a reward of groups: each sample's index."""

    async def score_one(self, names: Any, samples: Any) -> Any:
        call = RewardCall("diversity", 0.0, 1.0, len(samples), 0)
        return {"diversity": [PartScore(float(one.sample_index), {}, call) for one in samples]}


async def test_each_sample_of_a_group_has_its_own_score_and_a_negative_weight_lowers_the_reward():
    digen = DigenConfig(reward=RewardConfig({"diversity": {"weight": -2.0}}))
    rewards = SampleRewards({"diversity": [Handle(Places())]}, {"diversity": -2.0}, digen)
    asked = [rewards.score(make_sample(index), version=0, group_size=3) for index in (2, 0, 1)]
    assert [score.total for score, _ in await asyncio.gather(*asked)] == [-4.0, 0.0, -2.0]


async def test_latents_reach_the_rewards_that_read_them_and_no_other(mine):
    named = {"final": {"weight": 1.0, "reward": f"{mine}:Final"}, "blind": {"weight": 1.0, "reward": f"{mine}:Blind"}}
    digen = DigenConfig(reward=RewardConfig(named))
    sample = replace(make_sample(), latents=SampleLatents(torch.full((2, 3, 3), 7.0), {}))
    score, _ = await rewards_of(digen).score(sample, version=0, group_size=1)
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


def test_a_sample_that_kills_whoever_scores_it_fails_alone_and_says_so(monkeypatch):
    async def died(self: Any, calls: Any) -> Any:
        raise ActorUnavailableError("gone again", None)

    monkeypatch.setattr(Lengths, "score", died)
    (failed,) = score_group(DigenConfig(), size=1)
    assert isinstance(failed, ScoringError) and "the reward worker died whenever it scored this sample" in str(failed)


@pytest.mark.parametrize("error", [OSError, SystemExit])
async def test_a_reward_manager_of_the_users_own_gives_one_score_beside_the_pools(mine, monkeypatch, error):
    class Mine:
        def __init__(self, config, tokenizer, compute_score):
            self.num_calls = 0

        async def run_single(self, data: Any) -> Any:
            (sample,) = samples_of(data)
            self.num_calls += 1
            if self.num_calls == 1:
                raise error("the first call fails, and is tried again")
            told = {"light": float(sample.pixels.max()), "text": sample.row.text}
            return {"reward_score": 1.0 + sample.is_validation, "reward_extra_info": told}

    monkeypatch.setattr("verl_digen.reward.manager.resolve_reward_manager_cls", lambda config: Mine)
    named = {"jpeg_compressibility": 1.0, "bright": {"weight": 2.0, "reward": f"{mine}:Bright"}}
    reward = {"reward_manager": {"name": "Mine"}, "custom_reward_function": {"path": None}}
    config = OmegaConf.create({"digen": {"reward": {"functions": named}}, "reward": reward})
    worker = DiffusionRewardLoopWorker(config)
    handles = {SHARED: [Handle(worker)], "bright": [Handle(RewardPoolWorker(config, "bright"))]}
    rewards = SampleRewards.of_run(config, handles, DigenConfig(reward=RewardConfig(named)))
    sample = replace(make_sample(value=7), is_validation=True)
    score, _ = await rewards.score(sample, version=0, group_size=1)
    assert score.total == 2.0 + 2.0 * 7.0
    assert score.parts == {"manager": 2.0, "manager/light": 7.0, "bright": 7.0, "bright/red": 1.0}


@pytest.mark.parametrize(
    ("combine", "expected"),
    [
        ("sum", "reward = 0.7 x ocr + 0.3 x pick (only logged: gold)"),
        ("gdpo", "advantage = 0.7 x A(ocr) + 0.3 x A(pick), each reward normalised in its group (only logged: gold)"),
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
        ("diversity", {"weight": 1, "size_px": 0}, "diversity.size_px must be >= 1, got 0; 32 is the default"),
        ("jpeg_compressibility", {"weight": 1, "scale": 2}, "take the other names out of the entry's arguments"),
        ("x", {"weight": 1, "reward": "collections.OrderedDict"}, "must be a class of verl_digen.reward.base.Reward"),
    ],
)
def test_arguments_that_a_reward_does_not_take_are_refused_with_its_key(name, value, message):
    with pytest.raises(ValueError) as refused:
        check(reward_entry(name, value))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"ocr": 1.0}, "b.jsonl:2: digen.reward.functions.ocr: a prompt of a text reward must have the text to show"),
        ({"ocr_vlm": {"weight": 1.0, "url": "http://h:1"}}, "b.jsonl:2: digen.reward.functions.ocr_vlm: a prompt"),
        (
            {"g": {"weight": 1.0, "reward": "server", "protocol": "flow_grpo_geneval", "url": "http://h:1"}},
            "a.jsonl:1: digen.reward.functions.g: a prompt of GenEval must have the columns tag and include",
        ),
        ({"g": {"weight": 1.0, "reward": "server", "protocol": "nosuch", "url": "http://h:1"}}, None),  # `check` tells
        ({"ocr": {"weight": 0.0, "when": "validation"}}, None),
        ({"ocr": {"weight": 1.0, "data_sources": ["text"]}}, None),
        ({"diversity": 1.0}, None),
        ({"image_similarity": 0.5}, "a.jsonl:1: .*image_similarity needs prompts with images, got 'a sign"),
        ({"yes_no": 1.0}, None),
        ({"yes_no": {"weight": 1.0, "question": "a {style}?"}}, "a.jsonl:1: .*every prompt has .*got 'style'"),
    ],
)
def test_the_first_prompt_that_a_reward_cannot_score_is_named(named, told):
    rows = [
        PromptRow('a sign "GO"', "text", None, place="a.jsonl:1"),
        PromptRow("a cat", "cats", None, place="b.jsonl:2"),
    ]
    refused = nullcontext() if told is None else pytest.raises(ValueError, match=told)
    with refused:
        check_rows(RewardConfig(named), rows, is_validation=False)


def test_a_check_of_rows_that_raises_is_a_refusal_of_the_row(mine):
    row = PromptRow("a cat", "cats", None, place="b.jsonl:2")
    with pytest.raises(ValueError, match=r"b.jsonl:2: digen.reward.functions.tagged: KeyError\('tag'\)"):
        check_rows(RewardConfig({"tagged": {"weight": 1.0, "reward": f"{mine}:Tagged"}}), [row], is_validation=False)


def test_a_package_that_is_not_installed_is_named_before_it_is_imported(monkeypatch):
    check_packages(RewardConfig({"ocr": 1.0, "diversity": 1.0}))
    for packages in (("nosuch",), ("nosuch.part",)):
        monkeypatch.setattr(diversity.Diversity, "packages", packages)
        with pytest.raises(
            ValueError, match=r"reward far needs the package nosuch, which is not installed; pip install"
        ):
            check_packages(RewardConfig({"far": {"weight": 1.0, "reward": "diversity"}}))
    monkeypatch.setattr(diversity.Diversity, "packages", ("torch"))
    with pytest.raises(ValueError, match=r"packages of the reward diversity must be a tuple .*; write \('torch',\)"):
        check_packages(RewardConfig({"diversity": 1.0}))


def test_the_arguments_of_an_entry_are_the_settings_of_its_class():
    entry = reward_entry("few", {"weight": 1, "reward": "diversity", "size_px": 8, "num_gpus": 0.5})
    assert check(entry)[1] == diversity.DiversityConfig(8)
    assert entry.pool == PoolSettings(num_gpus=0.5)


# -- sound of a video on its way to rewards of both kinds ----------------------------------------------------
PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
LISTENERS = """
from verl_digen.reward.base import Reward


class Lasting(Reward):
    def score(self, batch):
        return [0.0 if one.audio is None else one.audio.waveform.shape[1] / one.audio.rate_hz for one in batch]


def peak(data_source, solution_image, ground_truth, extra_info=None):
    if "audio" not in extra_info:
        return -1.0
    return {"score": abs(extra_info["audio"].waveform).max(), "channels": len(extra_info["audio"].waveform)}
"""


@pytest.mark.parametrize(
    ("audio", "expected"),
    [(Audio(np.linspace(-0.75, 0.5, 60, dtype=np.float32).reshape(2, 30), 400), (30 / 400, 0.75)), (None, (0.0, -1.0))],
    ids=["sound", "silent"],
)
async def test_a_class_and_a_function_get_the_waveform_and_its_rate(
    audio: Audio | None, expected: tuple[float, float], tmp_path: Path
) -> None:
    path = tmp_path / "listeners.py"
    path.write_text(LISTENERS)
    named = {"lasting": {"weight": 1.0, "reward": f"{path}:Lasting"}, "peak": {"weight": 2.0, "reward": f"{path}:peak"}}
    digen = DigenConfig(reward=RewardConfig(named))
    config = OmegaConf.create({"digen": {"reward": {"functions": named}}})
    handles = {
        SHARED: [Handle(DiffusionRewardManager(config))],
        "lasting": [Handle(RewardPoolWorker(config, "lasting"))],
    }
    rewards = SampleRewards(handles, digen.reward.weights(has_custom=False), digen)
    score, _ = await rewards.score(replace(make_sample(), audio=audio), version=0, group_size=1)
    assert (score.parts["lasting"], score.parts["peak"]) == expected
    assert score.total == expected[0] + 2.0 * expected[1]
    assert audio is None or score.parts["peak/channels"] == 2


def test_the_function_of_the_page_measures_loudness_and_length() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text().split("\n## Sound\n")[1].split("\n## ")[0], re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec"), names)
    sample = replace(make_sample(), audio=Audio(np.full((2, 30), -0.5, np.float32), rate_hz=400))
    arguments = call_arguments(sample)
    assert names["compute_score"](**arguments) == {"score": 0.5, "seconds": 30 / 400}
    arguments["extra_info"]["audio"].waveform[:] = 0
    assert sample.audio is not None and sample.audio.waveform.min() == -0.5, "another function gets the sound itself"
