# SPDX-License-Identifier: Apache-2.0
"""Distillation through verl's own main, on separate pools."""

from dataclasses import replace

import pytest

from tests.e2e.conftest import CHECKPOINT, assert_succeeded, run_main, steps_of
from tests.engine.teacher import ADAPTER, save_adapter

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.grid]

TARGETS = ["attn.to_v", "img_mlp.net.2"]


def test_a_student_comes_nearer_to_its_teacher(tmp_path):
    """Prompts and steps are the same each time, so that distances compare."""
    teacher = save_adapter(CHECKPOINT, tmp_path / "teacher", replace(ADAPTER, target_modules={*TARGETS}), std=0.2)
    run = run_main(
        tmp_path / "run",
        f"digen.loss.teacher={teacher}",
        "data.train_max_samples=4",
        "data.shuffle=false",
        "actor_rollout_ref.model.lora_rank=4",
        f"actor_rollout_ref.model.target_modules={TARGETS}",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        "digen.window.range=[0,3]",
        "trainer.total_training_steps=6",
        "digen.tag.policy=always",
        recipe="[digen_flowgrpo,disaggregated,opd]",
    )
    assert_succeeded(run)
    steps = steps_of(run)
    assert all(row["actor/policy_loss"] == row["actor/teacher_kl"] > 0 for row in steps)
    first, last = (row["actor/teacher_velocity_distance"] for row in (steps[0], steps[-1]))
    assert last < 0.8 * first
