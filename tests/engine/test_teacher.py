# SPDX-License-Identifier: Apache-2.0
"""The teacher of a run: the policy that it is, and folders that are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import nn

from tests.engine.harness import (
    LORA,
    assert_equal,
    local_weights,
    make_batch,
    make_engine,
    perturb,
    read_samples,
    train,
)
from tests.engine.serial import flow_step
from tests.engine.teacher import ADAPTER, plain_teacher, save_adapter, teacher_folder
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.rows import make_rows
from verl_digen.engine.saved_state import SavedState
from verl_digen.engine.teacher import adapter_shapes, check_teacher_files

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return make_batch(tiny_qwen_image, group_size=2)


def taught_engine(path: Path, teacher: str, model: dict[str, Any] = LORA) -> DiffusersFSDPEngine:
    return make_engine(path, digen={"loss": {"name": "opd", "teacher": teacher}}, model=model)


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "alpha_pattern": {"attn.to_q": 9}}], ids=["plain", "rs"])
def test_a_teacher_is_the_base_with_its_adapter_merged(
    tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict, settings: dict[str, Any]
):
    """The student has other weights, and keeps them."""
    folder = Path(teacher_folder(tiny_qwen_image))
    if settings:  # factors for which peft computes what the plain adapter does
        folder = Path(changed_copy(str(folder), tmp_path / "changed", **settings))
        tensors = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
        for name, value in tensors.items():
            if "lora_B" in name:
                value *= 5 / 4 / ((9 if "attn.to_q" in name else 5) / 2)
        save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME)
    engine = taught_engine(tiny_qwen_image, str(folder))
    perturb(engine)
    before = local_weights(engine)
    rows = make_rows(engine.points, read_samples(batch), [(0, [1])]).to(engine.forward.device)
    (found,) = engine.forward.others({"teacher": ["velocity", "mean"]}, [lambda: rows])
    with torch.no_grad():
        mean, *_, velocity = flow_step(plain_teacher(tiny_qwen_image), tiny_qwen_image, batch, 0, 1, 1.0)
    torch.testing.assert_close(found["teacher"]["velocity"], velocity, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["teacher"]["mean"], mean, rtol=1e-4, atol=1e-5)
    assert_equal(local_weights(engine), before)


def test_a_resumed_run_reads_its_teacher_again_and_goes_on_bitwise(
    tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict
):
    straight, first, resumed = (taught_engine(tiny_qwen_image, teacher_folder(tiny_qwen_image)) for _ in range(3))
    train(straight, batch, 2)
    train(first, batch, 1)
    first.save_checkpoint(str(tmp_path / "saved"))
    assert "teacher" not in SavedState(tmp_path / "saved").policies
    resumed.load_checkpoint(str(tmp_path / "saved"))
    train(resumed, batch, 1)
    assert_equal(local_weights(resumed), local_weights(straight))


def changed_copy(folder: str, target: Path, **changes: Any) -> str:
    """Copy of an adapter with changed settings of peft."""
    shutil.copytree(folder, target)
    file = target / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(target)


def without(folder: str, target: Path, name: str) -> str:
    """Copy of a folder without one file."""
    shutil.copytree(folder, target)
    (target / name).unlink()
    return str(target)


def of_config(path: Path, target: Path, **changes: Any) -> str:
    """Another adapter of the checkpoint."""
    return save_adapter(path, target, replace(ADAPTER, **changes))


def test_a_dora_adapter_can_teach(tmp_path: Path):
    settings = LoraConfig(r=2, target_modules=["0"], use_dora=True)
    student = get_peft_model(nn.Sequential(nn.Linear(4, 4)), settings)  # type: ignore[arg-type]
    student.save_pretrained(str(tmp_path))
    check_teacher_files(str(tmp_path), adapter_shapes(student))


def test_folders_that_cannot_teach_are_refused(tiny_qwen_image: Path, tmp_path: Path):
    adapter = teacher_folder(tiny_qwen_image)
    own = adapter_shapes(taught_engine(tiny_qwen_image, adapter).module)
    assert isinstance(check_teacher_files(adapter, own), LoraConfig)
    (tmp_path / "cut").mkdir()
    for name in ("adapter_config.json", SAFETENSORS_WEIGHTS_NAME):
        data = (Path(adapter) / name).read_bytes()
        (tmp_path / "cut" / name).write_bytes(data if name.endswith("json") else data[:-100])
    first, number = "base_model.model.img_in.lora_A.weight", len(own)
    for folder, message in (
        (str(tmp_path / "none"), "must be a folder with peft's adapter_config.json and adapter_model.safetensors on"),
        (without(adapter, tmp_path / "bare", SAFETENSORS_WEIGHTS_NAME), "must be a folder with peft's"),
        (changed_copy(adapter, tmp_path / "loha", peft_type="LOHA"), "must hold a LoRA adapter, got"),
        (str(tmp_path / "cut"), "must hold whole safetensors, got"),
        (
            of_config(tiny_qwen_image, tmp_path / "rank", r=3),
            f"the layers and the rank that train, {number} tensors, got {number} in '{tmp_path}/rank', of which "
            f"{number} differ, e.g. {first}: [3, 16] in place of [4, 16]; train an adapter like it "
            "(actor_rollout_ref.model.lora_rank=3 actor_rollout_ref.model.target_modules=['attn.to_out.0', 'attn.to_q'",
        ),
        (
            of_config(tiny_qwen_image, tmp_path / "fewer", target_modules=["attn.to_q"]),
            f"e.g. {first}: nothing in place of [4, 16]; train an adapter like it (actor_rollout_ref.model.lora_rank=4 "
            "actor_rollout_ref.model.target_modules=['attn.to_q'])",
        ),
        (
            of_config(tiny_qwen_image, tmp_path / "other", target_modules=["proj_out"]),
            f"e.g. {first}: nothing in place of",
        ),
        (
            of_config(tiny_qwen_image, tmp_path / "more", target_modules=[*LORA["target_modules"], "proj_out"]),
            "of which 2 differ, e.g. base_model.model.proj_out.lora_A.weight: [4, 32] in place of nothing",
        ),
        (of_config(tiny_qwen_image, tmp_path / "dora", use_dora=True), "lora_magnitude_vector: "),
    ):
        with pytest.raises(ValueError) as refused:
            check_teacher_files(folder, own)
        assert message in str(refused.value) and str(refused.value).startswith("digen.loss.teacher must ")
    with pytest.raises(ValueError, match=r"digen.loss.teacher must hold an adapter"):
        taught_engine(tiny_qwen_image, adapter, model={})
