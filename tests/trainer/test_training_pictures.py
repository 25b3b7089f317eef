# SPDX-License-Identifier: Apache-2.0
"""The pictures and distributions of a step and of a validation: what is drawn, and what TensorBoard reads."""

import json
import logging
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayTaskError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.tags import make_tag
from verl_digen.config import DigenConfig, RewardConfig
from verl_digen.data.rows import ROW
from verl_digen.errors import RunStopped
from verl_digen.observe.group_pictures import GroupPictures
from verl_digen.observe.images import save_pixels
from verl_digen.observe.run_files import image_path
from verl_digen.processes.supervision import Supervision
from verl_digen.store.keys import SampleName, group_uid, validation_uid
from verl_digen.trainer import run_output
from verl_digen.trainer.run_output import RunOutput, distributions, draw
from verl_digen.trainer.validation import Validation, draw_pictures, shown_samples
from verl_digen.types import PromptRow

PERF = ("images_per_s", "step_s", "generate_s", "train_s", "overhead_s")
WEIGHTS = {"a": 1.0, "b": 1.0, "gold": 0.0}
DIGEN = DigenConfig(num_logged_groups=2, logged_groups_every=5, report=False, reward=RewardConfig(WEIGHTS))


def step_samples(run_dir: Path, step: int):
    """Samples of a step of 4 groups of 3, after their agent loop worker; odd groups have no part `b`."""
    pictures, samples = GroupPictures(run_dir), {}
    for number in range(4 * (step - 1), 4 * step):
        for index in range(3):
            reward = number + index / 10
            tag = make_tag(
                reward,
                uid=group_uid(number),
                sample_index=index,
                parts={"a": reward, "a/detail": 1.0, **({"b": -reward} if number % 2 == 0 else {})},
            )
            samples[SampleName.of(tag.facts).key] = tag
            pixels = torch.full((4, 4, 3), number, dtype=torch.uint8)
            pictures.offer(step, group_uid(number), index, reward, pixels)
    return samples


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The arguments of the drawing tasks."""
    found: list[tuple] = []
    monkeypatch.setattr(run_output, "begin_beside", lambda work, *arguments: found.append(arguments))
    return found


def config_of(run_dir: Path, *loggers: str) -> DictConfig:
    return OmegaConf.create(
        {
            "data": {"train_batch_size": 4},
            "trainer": {"logger": loggers, "default_local_dir": str(run_dir)},
            "actor_rollout_ref": {"rollout": {"val_kwargs": {"n": 1}}},
            "reward": {"custom_reward_function": {"path": None}},
        }
    )


def make_output(run_dir: Path, digen: DigenConfig = DIGEN) -> RunOutput:
    """Output of a run with rewards `a`, `b` and `gold`."""
    output = RunOutput(config_of(run_dir, "tensorboard"), digen, run_dir)
    logging.getLogger(run_output.LOGGER).removeHandler(output._warnings)
    return output


def log(output: RunOutput, step: int, samples: dict, wandb: Any) -> None:
    """Write a step's output, with the metrics that the console shows."""
    shown = ("reward/mean", "reward/std", *(f"perf/{name}" for name in PERF))
    output.on_step(step, dict.fromkeys(shown, 1.0), samples, wandb, num_steps=10, remaining_s=0.0)


def test_the_first_groups_of_the_step_are_drawn_best_and_worst(tmp_path, drawn):
    logged = []
    wandb = SimpleNamespace(
        Image=lambda path, caption="": caption,
        Histogram=lambda values: values,
        Table=lambda columns, data: data,
        log=lambda data, step: logged.append(data),
    )
    output = make_output(tmp_path)
    log(output, 4, step_samples(tmp_path, 4), wandb)
    assert not drawn and not logged, "not a multiple of logged_groups_every"
    samples = step_samples(tmp_path, 5)
    log(output, 5, samples, wandb)
    [(_, step, shown, values, _)] = drawn
    captions = [f"{entry.reward:.1f} {entry.prompt}" for entry in shown]
    assert captions == [
        *("16.2 best of 3: a cat", "16.0 worst of 3: a cat"),
        *("17.2 best of 3: a cat", "17.0 worst of 3: a cat"),
    ]
    assert step == 5 and values == distributions(list(samples.values()), ["a", "b", "gold"])
    [data] = logged
    assert data["train/best_and_worst"][0] == "16.200  best of 3: a cat" and len(data["distribution/reward"]) == 12


def test_none_are_logged_with_0_groups(tmp_path, drawn):
    digen = replace(DIGEN, num_logged_groups=0)
    log(make_output(tmp_path, digen), 5, step_samples(tmp_path, 5), None)
    assert not drawn


def test_a_distribution_holds_the_samples_that_have_the_part(tmp_path):
    found = distributions(list(step_samples(tmp_path, 5).values()), ["a", "b", "gold"])
    assert {name: len(values) for name, values in found.items()} == {
        "distribution/reward": 12,
        "distribution/a": 12,
        "distribution/b": 6,
    }


def test_tensorboard_reads_the_grid_and_the_distributions(tmp_path, drawn):
    log(make_output(tmp_path), 5, step_samples(tmp_path, 5), None)
    draw(*drawn[0])
    read = EventAccumulator(str(tmp_path / "tensorboard" / "training"), size_guidance={"histograms": 0, "images": 0})
    read.Reload()
    [image] = read.Images("train/best_and_worst")
    assert image.step == 5 and image.encoded_image_string == (tmp_path / "images" / "train_000005.png").read_bytes()
    [histogram] = read.Histograms("distribution/a")
    written = json.loads((tmp_path / "images" / "train_000005.json").read_text())
    assert written["values"] == drawn[0][3]
    assert written["shown"][0] == {"file": "p00000016-002.png", "prompt": "best of 3: a cat", "reward": 16.2}
    value = histogram.histogram_value
    assert (value.num, round(value.min, 3), round(value.max, 3)) == (12, 16.0, 19.2)


# -- validations --------------------------------------------------------------------------------------------------
def validate(run_dir: Path, step: int, reward: float) -> None:
    """Draw two prompts of a validation of three, each with two samples, the second a video."""
    tags = {}
    for number in range(3):
        uid = validation_uid(number)
        for index in range(2):
            tag = make_tag(reward + number / 10 + index, uid=uid, sample_index=index, prompt=f"prompt {number}")
            tags[SampleName.of(tag.facts).key] = tag
        frames = torch.zeros((2, 8, 8, 3) if number == 1 else (8, 8, 3), dtype=torch.uint8)
        save_pixels(frames, image_path(run_dir, step, uid))
    shown = shown_samples(run_dir, step, tags, 2)
    assert {uid: (one.prompt, one.reward) for uid, one in shown.items()} == {
        "val-00000": ("prompt 0", reward),
        "val-00001": ("prompt 1", reward + 0.1),
    }
    draw_pictures(run_dir, step, shown, True)


def test_a_validation_has_a_grid_with_its_rewards_and_the_last_one_is_compared_with_the_first(tmp_path):
    validate(tmp_path, 0, 0.25)
    assert not (tmp_path / "images" / "before_after.png").exists()
    validate(tmp_path, 10, 0.5)
    assert (tmp_path / "images" / "before_after.png").is_file()
    written = json.loads((tmp_path / "images" / "step_000010.json").read_text())
    assert written[1] == {"uid": "val-00001", "file_name": "val-00001.gif", "prompt": "prompt 1", "reward": 0.6}
    read = EventAccumulator(str(tmp_path / "tensorboard" / "pictures"), size_guidance={"images": 0, "tensors": 0})
    read.Reload()
    assert set(read.Tags()["images"]) == {"val/pictures", "val/videos/val-00001"}
    [_, grid] = read.Images("val/pictures")
    assert (grid.step, grid.encoded_image_string) == (10, (tmp_path / "images" / "step_000010.png").read_bytes())
    table = read.Tensors("val/rewards/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "| prompt 1 | 0.6000 |" in table


def test_pictures_that_cannot_be_drawn_cost_a_warning_not_the_run(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    failed: Future[None] = Future()
    failed.set_exception(RayTaskError("draw", "traceback", OSError("cannot open resource")))
    monkeypatch.setattr(run_output, "begin_beside", lambda work, *arguments: failed)
    output = make_output(tmp_path)
    log(output, 5, step_samples(tmp_path, 5), None)
    log(output, 10, step_samples(tmp_path, 10), None)
    output.drawing.finish()
    said = "train/best_and_worst could not be written (OSError: cannot open resource); the run goes on"
    assert [record.message for record in caplog.records] == [f"the last {said}"] * 2
    validation = Validation(config_of(tmp_path), DIGEN, cast(Supervision, None))
    validation.drawing.begin(draw_pictures)
    validation.drawing.finish()
    assert caplog.messages[2:] == [f"pictures of the last validation {said.partition(' ')[2]}"]


def test_validation_prompts_that_failed_for_one_reason_are_one_warning(tmp_path, monkeypatch, caplog):
    validation = Validation(config_of(tmp_path), DIGEN, cast(Supervision, None))
    monkeypatch.setattr(validation, "generate", lambda rows, *_: ["no key"] * (len(rows) - 1) + ["no room"])
    with pytest.raises(RunStopped, match="validation at step 3: every prompt failed; the last: no room"):
        validation.run([{ROW: [PromptRow("a cat", "test", None)] * 3}], cast(Any, None), step=3)
    assert caplog.messages == ["2 of 3 validation prompts failed: no key", "1 of 3 validation prompts failed: no room"]
