# SPDX-License-Identifier: Apache-2.0
"""Starts with teachers: which are refused, and what is said."""

import json

import pytest

from tests.engine.teachers import teacher_folder
from verl_digen.preflight.inputs import check_prompts
from verl_digen.preflight.teachers import check_teachers

pytestmark = pytest.mark.slow


@pytest.fixture
def lessons(runnable, tiny_qwen_image, tmp_path) -> list[str]:
    """`runnable` with prompts of sources ocr and geneval, a teacher for each."""
    lines = [{"prompt": f"a cat {number}", "data_source": ("ocr", "geneval")[number % 2]} for number in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    entries = ", ".join(
        f"{source}: {{path: {teacher_folder(tiny_qwen_image, name)}, data_sources: [{source}]}}"
        for source, name in (("ocr", "network"), ("geneval", "adapter"))
    )
    return [
        *("recipe=[digen_flowgrpo,opd]" if one.startswith("recipe=") else one for one in runnable),
        f"data.train_files={tmp_path / 'train.jsonl'}",
        f"+digen.loss.teachers={{{entries}}}",
    ]


def test_teachers_of_the_student_s_architecture_for_every_prompt_are_accepted(start, lessons):
    config = start(*lessons)
    check_teachers(config)
    check_prompts(config)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("digen.loss.teachers.ocr.path=/none",), "digen.loss.teachers.ocr.path must be a folder on this machine, got"),
        (("digen.loss.teachers.ocr.pat=/none",), "digen.loss.teachers.ocr.pat must be a key of a teacher"),
        (("digen.queue.drop_zero_spread=true",), "digen.queue.drop_zero_spread must be false with digen.loss.name=opd"),
        (
            ("+digen.loss.teachers.ocr.true_cfg_scale=4.5", "actor_rollout_ref.rollout.name=vllm_omni"),
            "actor_rollout_ref.rollout.name must be diffusers with digen.loss.teachers.ocr.true_cfg_scale > 1",
        ),
    ],
)
def test_teachers_that_cannot_teach_are_refused(start, lessons, given, message):
    given = [f"+{one}" if ".pat=" in one else one for one in given]
    with pytest.raises(ValueError) as refused:
        check_teachers(start(*lessons, *given))
    assert message in str(refused.value)


def test_an_objective_with_teachers_needs_one(start, runnable):
    with pytest.raises(ValueError, match=r"digen.loss.teachers must name a teacher with digen.loss.name=opd_forward"):
        check_teachers(start(*runnable, "digen.loss.name=opd_forward", "digen.kl.coef=0"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["digen.loss.teachers.ocr.data_sources=[ocrr]"], "ocr.data_sources must name a data_source of the prompts"),
        (["~digen.loss.teachers.ocr"], "must have a teacher, got ['ocr']; add it to"),
    ],
)
def test_prompts_without_a_teacher_and_teachers_without_prompts_are_refused(start, lessons, given, message):
    with pytest.raises(ValueError) as refused:
        check_prompts(start(*lessons, *given))
    assert message in str(refused.value)
