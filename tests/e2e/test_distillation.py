# SPDX-License-Identifier: Apache-2.0
"""Distillation through verl's own main, on separate pools: two LoRA teachers by data source, with guidance."""

import json
from dataclasses import replace

import pytest
import torch
from peft import get_peft_model

from tests.e2e.conftest import CHECKPOINT, PROMPTS, run_main, steps_of
from tests.e2e.test_training import assert_succeeded
from tests.engine.teachers import ADAPTER
from verl_digen.models import load_model

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SOURCES = ("left", "right")


@torch.no_grad()
def save_teacher(folder, seed: int) -> None:
    """Save a LoRA adapter of its own rank, far enough from the checkpoint to be seen."""
    torch.manual_seed(seed)
    config = replace(ADAPTER, target_modules={"attn.to_v", "img_mlp.net.2"})
    module = get_peft_model(load_model(CHECKPOINT).load_transformer(torch.float32), config)  # type: ignore[arg-type]
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.05)
    module.save_pretrained(str(folder))


def test_a_student_comes_nearer_to_its_two_guided_teachers(tmp_path):
    """Prompts and steps are the same each time, so that distances compare."""
    for seed, source in enumerate(SOURCES):
        save_teacher(tmp_path / source, seed)
    rows = [json.loads(line) for line in (PROMPTS / "train.jsonl").read_text().splitlines()[:4]]
    for number, row in enumerate(rows):
        row["data_source"] = SOURCES[number % 2]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    teachers = ", ".join(
        f"{source}: {{path: {tmp_path / source}, data_sources: [{source}], true_cfg_scale: 2.0}}" for source in SOURCES
    )
    run = run_main(
        tmp_path / "run",
        f"+digen.loss.teachers={{{teachers}}}",
        f"data.train_files={tmp_path / 'train.jsonl'}",
        "data.shuffle=false",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        "digen.window.range=[0,3]",
        "trainer.total_training_steps=6",
        "digen.tag.policy=always",
        recipe="[digen_flowgrpo,disaggregated,opd]",
    )
    assert_succeeded(run)
    steps = steps_of(run)
    assert all(row["actor/distill_loss"] == row["actor/teacher_kl"] > 0 for row in steps)
    first, last = (row["actor/teacher_velocity_distance"] for row in (steps[0], steps[-1]))
    assert last < 0.8 * first, "0.13 to 0.085"
