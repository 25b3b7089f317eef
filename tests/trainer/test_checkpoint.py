# SPDX-License-Identifier: Apache-2.0
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from ray.exceptions import RayTaskError
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from verl_digen.config import DigenConfig
from verl_digen.engine.driver_checkpoint import (
    DriverState,
    digest,
    load_driver_state,
    load_open_prompts,
    publish,
    save_driver_state,
)
from verl_digen.errors import RunStopped
from verl_digen.observe.run_files import replace_text
from verl_digen.trainer.colocated import ColocatedTrainer
from verl_digen.types import PromptRow

PROMPT = PromptRow(
    "a cat", "animals", None, "ugly", {"n": 1}, uid="p7", index=3, images=("/a.png",), pair=("/b.png", "/c.png")
)


def test_the_driver_state_survives_a_round_trip(tmp_path):
    save_driver_state(tmp_path / "global_step_3", DriverState(24, "0f"), {"position": 24}, [PROMPT])
    assert load_open_prompts(tmp_path / "global_step_3") == [PROMPT]
    assert load_driver_state(tmp_path / "global_step_3") == DriverState(24, "0f")


def test_verl_finds_the_published_checkpoint(tmp_path):
    for step in (3, 6):
        (tmp_path / f"global_step_{step}").mkdir()
        publish(tmp_path, step)
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_6")


def test_a_full_disk_leaves_the_old_pointer(tmp_path, monkeypatch):
    publish(tmp_path, 3)

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        replace_text(tmp_path / "latest_checkpointed_iteration.txt", "6")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_a_checkpoint_of_another_trainer_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"trainer.resume_mode=disable"):
        load_driver_state(tmp_path)


def test_prompts_are_saved_as_json_and_a_value_that_json_does_not_give_back_is_refused(tmp_path):
    extra = {"boxes": np.array([[1.5, 2.0]]), "tags": ("a", "b"), "is_easy": True}
    row = replace(PROMPT, index=np.int64(7), extra=extra, place="line 8 of 'a.jsonl'")
    save_driver_state(tmp_path, DriverState(1, ""), {}, [row])
    (found,) = load_open_prompts(tmp_path)
    assert found == replace(PROMPT, index=7, extra={"boxes": [[1.5, 2.0]], "tags": ["a", "b"], "is_easy": True})
    assert found.place == row.place
    for value in (object(), {1: "a"}):
        with pytest.raises(ValueError, match=r"data.train_files: line 8 of 'a.jsonl' must hold texts.* of type "):
            save_driver_state(tmp_path, DriverState(1, ""), {}, [replace(row, extra={"x": value})])


class Resumed(ColocatedTrainer):
    """The project's trainer that has loaded a checkpoint of step 3, without processes."""

    def __init__(self, step_dir, prompts, digen):
        self.config = OmegaConf.create({"trainer": {"resume_mode": "resume_path", "resume_from_path": str(step_dir)}})
        self.train_dataset, self.digen, self.num_loaders = SimpleNamespace(prompts=prompts), digen, 0
        self._supervision: Any = SimpleNamespace(watch=lambda *what: nullcontext())
        self._output: Any = SimpleNamespace(keep_until=lambda step: None)
        self._watch: Any = SimpleNamespace(load=lambda folder: None)
        self.run_dir = step_dir.parent

    def _init_dataloader(self):
        self.num_loaders += 1


@pytest.mark.parametrize("is_other", [False, True])
def test_a_resume_with_another_prompt_file_draws_it_from_its_start_and_says_so(tmp_path, monkeypatch, caplog, is_other):
    rows = [PromptRow(text, "s", None) for text in "abcd"]
    save_driver_state(tmp_path / "global_step_3", DriverState(8, digest(rows)), {}, rows[:1])
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: setattr(self, "global_steps", 3))
    trainer = Resumed(tmp_path / "global_step_3", rows[: 4 - is_other], DigenConfig())
    trainer._load_checkpoint()
    assert trainer.num_loaders == is_other and ("are drawn from their start, after 1" in caplog.text) == is_other
    assert (trainer._num_prompts_drawn, [row.text for row in trainer._drawn]) == (8, ["a"])


def test_a_slash_at_the_end_of_a_checkpoint_s_path_does_not_hide_its_step(tmp_path, monkeypatch):
    def read(self):
        self.global_steps = int(self.config.trainer.resume_from_path.split("global_step_")[-1])  # as verl does

    save_driver_state(tmp_path / "global_step_3", DriverState(8, digest([PROMPT])), {}, [])
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", read)
    trainer = Resumed(tmp_path / "global_step_3", [PROMPT], DigenConfig())
    trainer.config.trainer.resume_from_path += "/"
    trainer._load_checkpoint()
    assert trainer.global_steps == 3


def test_a_checkpoint_that_the_ranks_refuse_is_told_in_one_paragraph(tmp_path, monkeypatch):
    def refuse(self):
        cause = ValueError("must hold all files of one save")
        raise RayTaskError("load_checkpoint", "Traceback of the rank", cause).as_instanceof_cause()

    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", refuse)
    with pytest.raises(RunStopped, match=r"^must hold all files of one save$"):
        Resumed(tmp_path / "global_step_3", [], DigenConfig())._load_checkpoint()
