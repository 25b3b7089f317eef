# SPDX-License-Identifier: Apache-2.0
"""`image_reward` on a tiny checkpoint, against scores of the image-reward package (`tiny_scorers.py`)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.reward.contract import check_contract
from tests.reward.tiny_scorers import MED_CONFIG, PLACE, TEXTS, image_reward_state, pictures, write_image_reward
from verl_digen.config.reward import reward_entry
from verl_digen.reward.named import make
from verl_digen.reward.scorers.image_reward import ImageReward
from verl_digen.types import PromptRow, RewardInput


def make_image_reward(folder: Path, **settings) -> ImageReward:
    entry = reward_entry("image_reward", {"weight": 1.0, "path": str(folder), "tokenizer": str(folder), **settings})
    made = make(entry, torch.device("cpu"))
    assert isinstance(made, ImageReward)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_image_reward(tmp_path_factory.mktemp("image_reward"))


def test_scores_are_those_of_the_image_reward_package(folder):
    samples = [
        RewardInput(np.asarray(image), PromptRow(text, "test", None), 0)
        for image, text in zip(pictures(), TEXTS, strict=True)
    ]
    expected = json.loads(PLACE.read_text())["image_reward"]
    assert make_image_reward(folder).score(samples) == pytest.approx(expected, abs=1e-5)


def test_the_contract_holds(folder):
    check_contract(make_image_reward(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"blip.visual_encoder.norm.weight": None}, "missing: post_layernorm.weight"),
        ({"blip.text_encoder.pooler.dense.weight": torch.zeros(2, 2)}, "unexpected: pooler.dense.weight"),
        ({"mlp.layers.0.weight": torch.zeros(1024, 7)}, "of another shape: layers.0.weight"),
        ({"blip.visual_encoder.pos_embed": None}, "must hold BLIP's picture encoder"),
    ],
)
def test_other_weights_are_refused_by_the_names_of_their_tensors(folder, tmp_path, change, said):
    state = {name: tensor for name, tensor in (image_reward_state() | change).items() if tensor is not None}
    torch.save(state, tmp_path / "ImageReward.pt")
    (tmp_path / "med_config.json").write_text(json.dumps(MED_CONFIG))
    with pytest.raises(ValueError, match="image_reward: path must hold") as caught:
        make_image_reward(folder, path=str(tmp_path))
    assert said in str(caught.value)


def test_a_config_that_lacks_keys_is_refused(tmp_path):
    folder = write_image_reward(tmp_path)
    (folder / "med_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"med_config.json must have all keys, got \['hidden_act', "):
        make_image_reward(folder)
