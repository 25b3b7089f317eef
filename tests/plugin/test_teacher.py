# SPDX-License-Identifier: Apache-2.0
"""Starts with a teacher: which are refused, and what is said."""

import pytest

from tests.engine.harness import LORA
from tests.engine.teacher import teacher_folder
from verl_digen.preflight.adapter import check_teacher
from verl_digen.preflight.rules import check
from verl_digen.preflight.start_config import StartConfig

pytestmark = pytest.mark.slow


@pytest.fixture
def lesson(runnable, tiny_qwen_image) -> list[str]:
    """`runnable` with a teacher."""
    return [
        *("recipe=digen_flowgrpo+opd" if one.startswith("recipe=") else one for one in runnable),
        f"digen.loss.teacher={teacher_folder(tiny_qwen_image)}",
        f"actor_rollout_ref.model.lora_rank={LORA['lora_rank']}",
        f"actor_rollout_ref.model.target_modules={LORA['target_modules']}",
    ]


def test_an_adapter_like_the_one_that_trains_is_accepted(start, lesson):
    check(start(*lesson))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["digen.loss.teacher=/none"], "digen.loss.teacher must be a folder with peft's adapter_config.json and"),
        (
            ["digen.loss.teacher=null"],
            "digen.loss.teacher must be the folder of a LoRA adapter with digen.loss.name=opd",
        ),
        (["digen.queue.drop_zero_spread=true"], "digen.queue.drop_zero_spread must be false with digen.loss.name=opd"),
        (
            ["actor_rollout_ref.model.lora_rank=0"],
            "actor_rollout_ref.model.lora_rank must be that of the teacher's adapter with digen.loss.name=opd, whose "
            "teacher and student are adapters of one base, got 0; set actor_rollout_ref.model.lora_rank",
        ),
        (["actor_rollout_ref.model.lora_rank=8"], "train an adapter like it (actor_rollout_ref.model.lora_rank=4 "),
        (["actor_rollout_ref.model.target_modules=[attn.to_q]"], "4 tensors, got 14 in"),
    ],
)
def test_teachers_that_cannot_teach_are_refused(start, lesson, given, message):
    with pytest.raises(ValueError) as refused:
        check_teacher(StartConfig(start(*lesson, *given)))
    assert message in str(refused.value)
