# SPDX-License-Identifier: Apache-2.0
"""The tiny edit model that ships: its prompts, its lessons, and the script that pretrains it."""

import importlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_edits import instruction
from drawn_scenes import caption
from shape_edit_reward import compute_score

from verl_digen.data.prompts import read_prompts
from verl_digen.inputs.images import PromptInputs, read_images, source_image
from verl_digen.models import load_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDERS = (EXAMPLES / "tiny_edit", EXAMPLES / "tiny_qwen_image")


def test_shipped_prompts_are_the_scripts_and_the_splits_are_disjoint(examples: None) -> None:
    prompts, lessons = (importlib.import_module(name) for name in ("edit_prompts", "edit_lessons"))
    splits = prompts.split_tasks(0)
    seen = {name: {task.scene for task in tasks} for name, tasks in splits.items()}
    assert not seen["train"] & seen["val"]
    assert {name: len(found) for name, found in seen.items()} == prompts.NUM_PROMPTS
    for name, tasks in splits.items():
        rows = read_prompts(str(FOLDERS[0] / "prompts" / f"{name}.parquet"))
        assert [row.text for row in rows] == [instruction(task.edit) for task in tasks]
        for row, task in list(zip(rows, tasks, strict=True))[:4]:
            assert row.ground_truth == {"target": caption(task.target()), "changed": task.edit.attribute}
            (image,) = read_images(row.images)
            assert np.array_equal(np.asarray(image), lessons.picture(task.scene, task.drawing))
    assert set(Counter(task.edit.attribute for task in splits["val"]).values()) == {12}


def test_a_lesson_shows_what_is_asked_for_and_disobeys_as_often_as_told(examples: None) -> None:
    lessons = importlib.import_module("edit_lessons")
    tasks = lessons.draw_tasks(np.random.default_rng(0), 3)
    embeds = [torch.full((1, 1), float(number)) for number in range(len(tasks))]
    scenes = lessons.single_scenes()

    def album(shown, drawings):
        return torch.tensor([[scenes.index(scene), drawing] for scene, drawing in zip(shown, drawings, strict=True)])

    def wrong(disobedience: float) -> float:
        batch = lessons.lesson(album, tasks, embeds, disobedience)(np.random.default_rng(1), 400)
        asked = [tasks[int(number)] for number in batch.embeds[:, 0, 0]]
        assert [(scenes[i], drawing) for i, drawing in batch.source.tolist()] == [
            (task.scene, task.drawing) for task in asked
        ]
        assert batch.x0[:, 1].equal(batch.source[:, 1]), "both pictures are drawn alike"
        return float(
            np.mean([scenes[i] != task.target() for (i, _), task in zip(batch.x0.tolist(), asked, strict=True)])
        )

    assert wrong(0.0) == 0.0
    assert 0.6 < wrong(0.5) < 0.9


def test_the_checkpoint_edits_some_pictures_as_the_replica_encodes_them(examples: None) -> None:
    pretrain, lessons = (importlib.import_module(name) for name in ("pretrain", "edit_lessons"))
    rows = read_prompts(str(FOLDERS[0] / "prompts" / "val.parquet"))
    model = load_model(FOLDERS[0] / "checkpoint")
    encode = model.load_encoder(torch.float32, torch.device("cpu"))
    conditions = encode([PromptInputs(row.text, tuple(map(source_image, row.images)), 64) for row in rows])
    pipeline = pretrain.untrained(0).pipeline
    pipeline.transformer = pretrain.QwenImageTransformer2DModel.from_pretrained(
        FOLDERS[0] / "checkpoint" / "transformer", torch_dtype=torch.float32
    )
    sources = torch.stack([condition["source"] for condition in conditions])
    batch = lessons.joined([condition["embeds"] for condition in conditions], torch.zeros_like(sources), sources)
    scores = [
        compute_score("tiny_edit", shown, row.ground_truth)["score"]
        for shown, row in zip(pretrain.edited(pipeline, batch, 0), rows, strict=True)
    ]
    assert 0.5 < np.mean(scores) < 0.7, "weak, and not without ability"


@pytest.mark.long
def test_pretraining_makes_a_checkpoint_that_is_loaded(examples: None, tmp_path: Path) -> None:
    pretrain = importlib.import_module("pretrain")
    pretrain.main(["--output", str(tmp_path), "--snapshots", str(tmp_path / "snapshots"), "--share", "0.004"])
    assert load_model(tmp_path / "checkpoint").spec.title == "Qwen-Image-Edit-Plus"
    assert '"_name_or_path": "examples/' in (tmp_path / "checkpoint" / "vae" / "config.json").read_text()
    rows = read_prompts(str(tmp_path / "prompts" / "val.parquet"))
    assert len(rows) == 48 and rows[0].images
