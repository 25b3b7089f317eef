# SPDX-License-Identifier: Apache-2.0
"""Pictures of training groups: which files there are, which are shown, and what W&B is given."""

import random
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tags import make_tag
from verl_digen.config import DigenConfig
from verl_digen.inputs.audio import Audio
from verl_digen.observe.group_pictures import GroupPictures, best_and_worst, is_group_logged
from verl_digen.observe.images import save_pixels
from verl_digen.observe.run_files import group_dir, sample_path

UID = "p00000072"
SOUND = Audio(np.zeros((2, 8), np.float32), rate_hz=400)


def picture(value: int, frames: int = 0) -> torch.Tensor:
    return torch.full((*((frames,) if frames else ()), 4, 4, 3), value, dtype=torch.uint8)


def files(run_dir, step=10) -> list[str]:
    return sorted(path.name for path in group_dir(run_dir, step).iterdir())


def test_only_a_sample_that_is_written_reads_its_prompts_images(tmp_path):
    Image.new("RGB", (3, 3)).save(tmp_path / "source.png")
    pictures = GroupPictures(tmp_path)
    for index, reward in enumerate((0.0, 1.0)):
        pictures.offer(10, UID, index, reward, picture(1), (str(tmp_path / "source.png"),))
    pictures.offer(10, UID, 2, 0.5, picture(1), ("nowhere.png",))
    with Image.open(sample_path(tmp_path, 10, UID, 0)) as written:
        assert written.width == 2 * written.height


@pytest.mark.parametrize("seed", range(30))
def test_the_files_are_the_best_and_the_worst_in_whatever_order(tmp_path, seed):
    rng = random.Random(seed)
    rewards = [rng.choice((0.1, 0.2, 0.3, 0.4)) for _ in range(rng.randint(1, 8))]
    pictures, order = GroupPictures(tmp_path), rng.sample(range(len(rewards)), len(rewards))
    for index in order:
        pictures.offer(10, UID, index, rewards[index], picture(index))
        assert len(files(tmp_path)) <= 2
    held = [int(name.removesuffix(".png").rpartition("-")[2]) for name in files(tmp_path)]
    assert {rewards[index] for index in held} == {min(rewards), max(rewards)}
    assert len(held) == len({min(rewards), max(rewards)})
    for index in held:
        assert (np.array(Image.open(sample_path(tmp_path, 10, UID, index))) == index).all()
    tags = {index: make_tag(reward) for index, reward in enumerate(rewards)}
    assert [entry.reward for entry in best_and_worst(tmp_path, 10, {UID: tags})] == [max(rewards), min(rewards)]


def test_a_sample_that_is_generated_again_replaces_its_picture(tmp_path):
    pictures = GroupPictures(tmp_path)
    for index, reward, value in ((0, 0.5, 1), (1, 0.9, 2), (1, 0.7, 3), (1, 0.5, 4)):
        pictures.offer(10, UID, index, reward, picture(value))
    assert files(tmp_path) == [f"{UID}-000.png"]
    pictures.offer(10, UID, 0, 0.4, picture(5))
    assert (np.array(Image.open(sample_path(tmp_path, 10, UID, 0))) == 5).all()


def test_a_group_does_not_take_over_the_files_of_a_run_before_a_resume(tmp_path):
    GroupPictures(tmp_path).offer(10, UID, 7, 0.5, picture(1))
    GroupPictures(tmp_path).offer(10, UID, 0, 0.5, picture(1))
    assert files(tmp_path) == [f"{UID}-000.png"]


def test_videos_that_are_neither_best_nor_worst_leave_no_file(tmp_path):
    pictures = GroupPictures(tmp_path)
    for index, reward in enumerate((0.5, 0.6, 0.7)):
        pictures.offer(10, UID, index, reward, picture(1, frames=3), audio=SOUND)
    assert files(tmp_path) == [f"{UID}-{index:03d}.{end}" for index in (0, 2) for end in ("gif", "png", "wav")]


def test_pictures_that_somebody_removes_meanwhile_fail_no_sample(tmp_path):
    pictures = GroupPictures(tmp_path)
    for index, reward in enumerate((0.5, 0.6, 0.7)):
        shutil.rmtree(tmp_path / "images", ignore_errors=True)
        pictures.offer(10, UID, index, reward, picture(1))
    assert files(tmp_path) == [f"{UID}-002.png"]


def test_groups_of_old_steps_are_forgotten(tmp_path):
    pictures = GroupPictures(tmp_path)
    for step in range(1, 20):
        pictures.offer(step, f"p{step:08d}", 0, 0.5, picture(1))
        assert len(pictures._held) <= 2


def test_a_trained_best_whose_file_is_gone_is_left_out(tmp_path):
    save_pixels(picture(1), sample_path(tmp_path, 10, UID, 0))
    tags = {0: make_tag(0.1), 1: make_tag(0.9)}
    assert [(entry.prompt, entry.reward) for entry in best_and_worst(tmp_path, 10, {UID: tags})] == [
        ("worst of 2: a cat", 0.1)
    ]


def test_the_first_groups_of_every_so_many_steps_are_shown():
    digen = DigenConfig(num_logged_groups=2, logged_groups_every=5)
    shown = [
        (step, number)
        for step in range(1, 11)
        for number in range(8 * (step - 1), 8 * step)
        if is_group_logged(digen, step=step, number=number, num_prompts=8)
    ]
    assert shown == [(5, 32), (5, 33), (10, 72), (10, 73)]
