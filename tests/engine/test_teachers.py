# SPDX-License-Identifier: Apache-2.0
"""Teachers from files: each form is the plain module it was saved from, and the student's weights stay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

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
from tests.engine.teachers import plain_teacher, teacher_folder
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.export import plain_name
from verl_digen.engine.folders import save_adapter
from verl_digen.engine.rows import make_rows
from verl_digen.engine.shadow import local_shards
from verl_digen.models.teacher_files import read_teacher

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return make_batch(tiny_qwen_image, group_size=2)


def taught_engine(path: Path, teachers: dict[str, str], model: dict[str, Any] | None = None) -> DiffusersFSDPEngine:
    entries = {name: {"path": folder, "data_sources": [name]} for name, folder in teachers.items()}
    engine = make_engine(path, digen={"loss": {"name": "opd", "teachers": entries}}, model=model)
    perturb(engine)
    return engine


def forms(path: Path, folder: Path) -> dict[str, tuple[str, str]]:
    """Form of the files -> (plain teacher, folder)."""
    network, adapter = (Path(teacher_folder(path, name)) for name in ("network", "adapter"))
    shutil.copytree(network, folder / "pipeline" / "transformer")
    module: Any = plain_teacher(path, "adapter")
    (folder / "export").mkdir()
    save_adapter(module, load_file(adapter / SAFETENSORS_WEIGHTS_NAME), folder / "export" / "lora_adapter")
    diffusers = folder / "diffusers"
    diffusers.mkdir()
    shutil.copy(folder / "export" / "lora_adapter" / "pytorch_lora_weights.safetensors", diffusers)
    return {
        "network": ("network", str(network)),
        "pipeline": ("network", str(folder / "pipeline")),
        "peft": ("adapter", str(adapter)),
        "export": ("adapter", str(folder / "export")),
        "diffusers": ("adapter", str(diffusers)),
    }


def every_weight(engine: DiffusersFSDPEngine) -> dict[str, Tensor]:
    names = {name for name, _ in engine.module.named_parameters()}
    return {name: shard.clone() for name, shard in local_shards(engine.module, names).items()}


@pytest.mark.parametrize("model", [None, LORA], ids=["full", "lora"])
def test_every_form_of_teacher_is_the_module_it_was_saved_from(
    tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict, model: dict | None
):
    known = forms(tiny_qwen_image, tmp_path)
    engine = taught_engine(tiny_qwen_image, {name: folder for name, (_, folder) in known.items()}, model)
    before = every_weight(engine)
    rows = make_rows(engine.points, read_samples(batch), [(0, [1])]).to(engine.forward.device)
    tiles = [lambda: rows] * len(known)
    outputs = engine.forward.others({"teacher": ["velocity"]}, tiles, list(known))
    for (form, (name, _)), output in zip(known.items(), outputs, strict=True):
        with torch.no_grad():
            expected = flow_step(plain_teacher(tiny_qwen_image, name), tiny_qwen_image, batch, 0, 1, 1.0)[-1]
        torch.testing.assert_close(output["teacher"]["velocity"], expected, rtol=1e-4, atol=1e-5, msg=form)
    assert_equal(every_weight(engine), before)
    if model is not None:
        exchanged = {plain_name(name).split(".")[-2] for name in engine.teachers["peft"].weights.shards}
        assert exchanged == {"to_v", "2", "img_in", "proj_out"}, "an adapter exchanges the weights of its own layers"


def test_a_resumed_run_goes_on_bitwise_and_refuses_other_teachers(
    tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict
):
    def make(name: str) -> DiffusersFSDPEngine:
        teachers = {"only": {"path": teacher_folder(tiny_qwen_image, name)}}
        return make_engine(tiny_qwen_image, digen={"loss": {"name": "opd", "teachers": teachers}})

    straight, first = make("adapter"), make("adapter")
    lessons = of_teacher(batch, "only")
    train(straight, lessons, 2)
    train(first, lessons, 1)
    first.save_checkpoint(str(tmp_path / "saved"))
    saved = torch.load(tmp_path / "saved" / "digen_state_world_size_1_rank_0.pt", weights_only=False)
    assert [*saved["teachers"]] == ["only"] and "only" not in saved["copies"], "weights of teachers are not saved"
    resumed = make("adapter")
    resumed.load_checkpoint(str(tmp_path / "saved"))
    train(resumed, lessons, 1)
    assert_equal(local_weights(resumed), local_weights(straight))
    with pytest.raises(ValueError, match=r"teachers only, and this run has none or other weights for only; set digen"):
        make("network").load_checkpoint(str(tmp_path / "saved"))


def of_teacher(batch: TensorDict, name: str) -> TensorDict:
    """The batch with all groups taught by one teacher."""
    taught = dict.fromkeys(tu.get(batch, "uid"), name)
    return tu.assign_non_tensor(batch.copy(), taught=taught)


def changed_copy(folder: str, target: Path, **changes: Any) -> str:
    """Copy of a peft adapter with changed settings."""
    shutil.copytree(folder, target)
    file = target / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(target)


def test_folders_without_a_teacher_of_this_architecture_are_refused_by_parameter(tiny_qwen_image: Path, tmp_path: Path):
    network, adapter = (teacher_folder(tiny_qwen_image, name) for name in ("network", "adapter"))
    shapes = {
        name: tuple(value.shape) for name, value in plain_teacher(tiny_qwen_image, "network").state_dict().items()
    }
    read_teacher(network, "KEY", ("transformer",)).check(shapes, "KEY")
    (tmp_path / "empty").mkdir()
    for path, message in (
        (str(tmp_path / "none"), "KEY must be a folder on this machine, got"),
        (str(tmp_path / "empty"), "KEY must hold a LoRA adapter"),
        (changed_copy(adapter, tmp_path / "dora", use_dora=True), "plain LoRA adapter, with use_dora=False, got True"),
    ):
        with pytest.raises(ValueError, match=message):
            read_teacher(path, "KEY", ("transformer",))
    (tmp_path / "cut").mkdir()
    weights = load_file(Path(network) / "diffusion_pytorch_model.safetensors")
    shutil.copy(Path(network) / "config.json", tmp_path / "cut")
    wide = weights["img_in.weight"]
    cut = tmp_path / "cut" / "diffusion_pytorch_model.safetensors"
    for changed, message in (
        ({name: value for name, value in weights.items() if name != "img_in.bias"}, "it lacks img_in.bias;"),
        (weights | {"other": wide.clone()}, "but it has, and the run's network has not, other;"),
        (weights | {"img_in.weight": wide[1:].clone()}, r"KEY must hold img_in.weight in the shape \["),
    ):
        save_file(changed, cut)
        with pytest.raises(ValueError, match=message):
            read_teacher(str(tmp_path / "cut"), "KEY", ("transformer",)).check(shapes, "KEY")
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(ValueError, match="KEY must hold whole safetensors files"):
        read_teacher(str(tmp_path / "cut"), "KEY", ("transformer",))
    tensors = load_file(Path(adapter) / SAFETENSORS_WEIGHTS_NAME)
    name = next(name for name in tensors if name.endswith("img_in.lora_A.weight"))
    other = changed_copy(adapter, tmp_path / "wide")
    save_file(tensors | {name: torch.zeros(3, 99)}, Path(other) / SAFETENSORS_WEIGHTS_NAME)
    with pytest.raises(ValueError, match=r"KEY must hold img_in.weight in the shape .* got \[\d+, 99\]"):
        read_teacher(other, "KEY", ("transformer",)).check(shapes, "KEY")
