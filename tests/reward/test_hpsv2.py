# SPDX-License-Identifier: Apache-2.0
"""`hpsv2` on a tiny checkpoint, against scores of the hpsv2 package (`tiny_scorers.py`)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.reward.contract import check_contract
from tests.reward.tiny_scorers import PLACE, TEXTS, hps_state, pictures, write_hps
from verl_digen.config.reward import reward_entry
from verl_digen.reward.named import make
from verl_digen.reward.scorers.hpsv2 import HpsV2
from verl_digen.types import PromptRow, RewardInput


def make_hps(folder: Path, **settings) -> HpsV2:
    entry = reward_entry("hpsv2", {"weight": 1.0, "path": str(folder), "base": str(folder), **settings})
    made = make(entry, torch.device("cpu"))
    assert isinstance(made, HpsV2)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_hps(tmp_path_factory.mktemp("hps"))


def samples() -> list[RewardInput]:
    return [
        RewardInput(np.asarray(image), PromptRow(text, "test", None), 0)
        for image, text in zip(pictures(), TEXTS, strict=True)
    ]


def test_scores_are_those_of_the_hpsv2_package(folder):
    expected = json.loads(PLACE.read_text())["hpsv2"]
    assert make_hps(folder).score(samples()) == pytest.approx(expected, abs=1e-5)


def test_the_old_end_of_text_in_published_configs_changes_nothing(folder, tmp_path):
    base = shutil.copytree(folder, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 2  # as in the config of laion/CLIP-ViT-H-14-laion2B-s32B-b79K
    (base / "config.json").write_text(json.dumps(config))
    expected = json.loads(PLACE.read_text())["hpsv2"]
    assert make_hps(folder, base=str(base)).score(samples()) == pytest.approx(expected, abs=1e-5)


def test_the_contract_holds(folder):
    check_contract(make_hps(folder))


def test_tensors_in_fp16_give_the_same_scores_to_their_precision(folder, tmp_path):
    half = {name: tensor.half() for name, tensor in hps_state().items()}
    torch.save({"state_dict": half}, tmp_path / "HPS_v2.1_compressed.pt")
    expected = json.loads(PLACE.read_text())["hpsv2"]
    found = make_hps(folder, path=str(tmp_path / "HPS_v2.1_compressed.pt")).score(samples())
    assert found == pytest.approx(expected, abs=5e-3) and found != pytest.approx(expected, abs=1e-7)


def test_a_file_that_is_no_checkpoint_is_refused(folder, tmp_path):
    torch.save([1, 2], tmp_path / "HPS_v2.1_compressed.pt")
    with pytest.raises(ValueError, match="hpsv2: path must hold tensors by name"):
        make_hps(folder, path=str(tmp_path))
    (tmp_path / "HPS_v2.1_compressed.pt").write_text("<html>not found</html>")
    with pytest.raises(ValueError, match="hpsv2: path must be a PyTorch file of tensors"):
        make_hps(folder, path=str(tmp_path))
    torch.save(hps_state(), tmp_path / "HPS_v2.1_compressed.pt")
    with pytest.raises(ValueError, match="hpsv2: path must hold state_dict"):
        make_hps(folder, path=str(tmp_path))
