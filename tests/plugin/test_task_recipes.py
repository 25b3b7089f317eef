# SPDX-License-Identifier: Apache-2.0
"""Recipes of flow_grpo's tasks, with its prompt files as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from tests.tiny_models import build_tiny
from verl_digen import preflight
from verl_digen.config import digen_config
from verl_digen.preflight.inputs import prompts_of
from verl_digen.preflight.start_config import StartConfig
from verl_digen.reward.named import BUILT_IN
from verl_digen.trainer.colocated import ColocatedTrainer
from verl_digen.trainer.dataset import DiffusionPromptDataset
from verl_digen.trainer.disaggregated import DisaggregatedTrainer

GENEVAL = {"tag": "counting", "include": [{"class": "cup", "count": 2}], "exclude": [{"class": "cup", "count": 3}]}
REWARDS = {"ocr": "ocr", "geneval": "server", "pickscore": "pickscore"}
"""Task -> the built-in reward of its recipe."""
NAMES = {
    "ocr": ("train.txt", "test.txt"),
    "geneval": ("train_metadata.jsonl", "test_metadata.jsonl"),
    "pickscore": ("train.txt", "test.txt"),
}
PROMPTS = {
    "ocr": 'A sign that says "Go"',
    "geneval": json.dumps({**GENEVAL, "prompt": "a photo of two cups"}),
    "pickscore": "a cat, oil on canvas",
}


@pytest.fixture(scope="module")
def tiny_sd3(tmp_path_factory) -> Path:
    return build_tiny("sd3", tmp_path_factory.mktemp("sd3") / "checkpoint")


@pytest.fixture
def dataset(tmp_path):
    """`dataset("ocr")` -> a folder as flow_grpo has it, with 24 prompts to train on and 3 to validate."""

    def make(task: str) -> Path:
        folder = tmp_path / "dataset" / task
        folder.mkdir(parents=True)
        for name, count in zip(NAMES[task], (24, 3), strict=True):
            (folder / name).write_text(f"{PROMPTS[task]}\n" * count)
        return folder

    return make


def run_of(task: str, folder: Path, checkpoint: Path) -> list[str]:
    """Overrides as a user types them, with a checkpoint that is small enough for this machine."""
    return [
        f"recipe=[digen_sd3,{task}]",
        f"data.train_files={folder}",
        f"data.val_files={folder}",
        f"actor_rollout_ref.model.path={checkpoint}",
        "digen.sampling.height_px=32",
        "digen.sampling.width_px=32",
    ]


@pytest.mark.parametrize("task", REWARDS)
def test_flow_grpos_files_pass_all_checks_and_reach_the_tasks_reward_with_what_it_needs(start, tiny_sd3, dataset, task):
    config = start(*run_of(task, dataset(task), tiny_sd3))
    assert REWARDS[task] in BUILT_IN
    preflight.check(config)
    train, val = prompts_of(StartConfig(config), "train").prompts, prompts_of(StartConfig(config), "val").prompts
    assert (len(train), len(val)) == (24, 3)
    assert {prompt.data_source for prompt in [*train, *val]} == {task}
    assert train[0].ground_truth == {"ocr": "Go", "geneval": "a photo of two cups"}.get(task, PROMPTS[task])
    assert train[0].extra == (GENEVAL if task == "geneval" else {})


class Made(Exception):
    """Raised in place of making verl's trainer."""


def test_the_trainer_names_the_files_of_each_split_before_verl_makes_the_data_sets(
    start, tiny_sd3, dataset, monkeypatch
):
    def stop(self, config):
        raise Made

    folder = dataset("geneval")
    monkeypatch.setattr(PPOTrainerSync, "__init__", stop)
    trainers: tuple[Any, ...] = (ColocatedTrainer, DisaggregatedTrainer)
    for trainer in trainers:
        # not the ranks, whose server would start in Ray
        config = start(*run_of("geneval", folder, tiny_sd3), "actor_rollout_ref.rollout.name=diffusers")
        with pytest.raises(Made):
            trainer(config)
        given = (config.data.train_files, config.data.val_files)
        assert [len(DiffusionPromptDataset(files, config=config.data)) for files in given] == [24, 3]


@pytest.mark.parametrize(
    ("recipe", "kl_coef"),
    [
        ("[digen_sd3,ocr]", 0.04),
        ("[digen_sd3,geneval]", 0.04),
        ("[digen_sd3,pickscore]", 0.01),
        ("[digen_sd3,pickscore,flowgrpo_fast]", 0.0),
        ("[digen_flux,pickscore]", 0.0),
        ("[digen_qwen_image,ocr]", 0.0),
    ],
)
def test_the_kl_weight_is_that_of_the_task_on_models_that_have_one(start, recipe, kl_coef):
    assert digen_config(start(f"recipe={recipe}")).kl.coef == kl_coef


def test_tasks_on_sd3_have_flow_grpos_published_numbers(start):
    """config/grpo.py and config/base.py of yifan123/flow_grpo: general_ocr_sd3, geneval_sd3, pickscore_sd3."""
    for task in REWARDS:
        config = start(f"recipe=[digen_sd3,{task}]")
        digen, actor, rollout = digen_config(config), config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        assert (actor.optim.lr, actor.optim.weight_decay, actor.optim.clip_grad) == (3e-4, 1e-4, 1.0)
        assert (tuple(actor.optim.betas), rollout.n, config.data.train_batch_size) == ((0.9, 0.999), 24, 24)
        sampling = digen.sampling
        assert (sampling.height_px, sampling.width_px, sampling.num_steps, sampling.val_num_steps) == (512, 512, 10, 40)
        assert (sampling.true_cfg_scale, sampling.val_true_cfg_scale) == (4.5, 4.5)
        assert (digen.sde.law, digen.sde.noise_level, digen.advantage.scale) == ("flow", 0.7, "batch")
        assert (digen.loss.get("clip_range", 1e-4), digen.ema.enable, digen.ema.max_decay) == (1e-4, True, 0.9)
        assert config.actor_rollout_ref.model.lora_rank == 32 and config.actor_rollout_ref.model.lora_alpha == 64
        (entry,) = digen.reward.entries
        assert (entry.name, entry.weight, entry.target) == (task, 1.0, REWARDS[task])


def test_tasks_have_folders_of_their_own(start):
    """A run with resume_mode=auto would go on from the checkpoints of another task otherwise."""
    folders = {start(f"recipe=[digen_sd3,{task}]").trainer.default_local_dir for task in REWARDS}
    assert folders == {f"outputs/digen_{task}/sd3" for task in REWARDS}


def test_two_tasks_train_on_both_rewards(start):
    config = start("recipe=digen_sd3+ocr+pickscore", "digen.reward.recipe_functions.pickscore.weight=0.5")
    assert digen_config(config).reward.weights(has_custom=False) == {"ocr": 1.0, "pickscore": 0.5}
