# SPDX-License-Identifier: Apache-2.0
"""`start.json` of a run: the command line, what it changed in the recipes, notes and versions."""

import json

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from verl_digen.preflight.run_folder import MISSING, changes, save_start
from verl_digen.report.summary import read_start


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    import verl  # noqa: F401 - loads the plugin, and with it the recipes

    folder = tmp_path_factory.mktemp("run")
    words = [
        "recipe=digen_quickstart",
        f"trainer.default_local_dir={folder}",
        "data.train_batch_size=4",
        "+trainer.own={a: 1}",
        "digen.reward.functions={jpeg_compressibility: 1.0}",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        save_start(compose("ppo_trainer", overrides=words, return_hydra_config=True), ["a note"])
    return folder, words


def test_the_file_says_what_the_command_line_changed_in_the_recipe(written):
    folder, words = written
    found = json.loads((folder / "start.json").read_text())
    assert found["words"] == words and found["recipes"] == ["digen_quickstart"] and found["notes"] == ["a note"]
    told = {key: (old, new) for key, old, new in found["changes"]}
    assert told == {
        "data.train_batch_size": (8, 4),
        "trainer.default_local_dir": ("outputs/${trainer.project_name}/${trainer.experiment_name}", str(folder)),
        "trainer.own.a": (MISSING, 1),
        "digen.reward.functions": (None, MISSING),
        "digen.reward.functions.jpeg_compressibility": (MISSING, 1.0),
    }
    assert found["config"]["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] == 4, "interpolations are resolved"
    assert "hydra" not in found["config"] and found["versions"]["verl"]


def test_the_report_reads_it(written):
    folder, words = written
    start = read_start(folder)
    assert start["words"] == words and ["data.train_batch_size", "8", "4"] in start["changes"]
    assert ["digen.loss.name", "flow_grpo"] in start["config"]


def test_equal_configs_have_no_changes():
    config = OmegaConf.create({"a": {"b": 1, "c": "${a.b}"}, "d": {}})
    assert list(changes(config, config)) == []
    other = OmegaConf.create({"a": {"b": 2, "c": "${a.b}"}, "d": {"e": None}})
    assert list(changes(config, other)) == [("a.b", 1, 2), ("d", {}, MISSING), ("d.e", MISSING, None)]
