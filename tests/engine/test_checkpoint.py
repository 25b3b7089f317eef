# SPDX-License-Identifier: Apache-2.0
"""Save all or nothing, resume bitwise, export for other tools."""

import json
import resource
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from peft import PeftModel
from tensordict import TensorDict

from tests.engine.harness import (
    LORA,
    RefusesToBeWritten,
    assert_equal,
    make_batch,
    make_engine,
    perturb,
    train,
    weights,
)
from tests.engine.serial import plain_transformer
from verl_digen.engine.folders import save_transformer

pytestmark = pytest.mark.usefixtures("one_rank")

EMA = {"ema": {"enable": True, "every_steps": 2}}


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return make_batch(tiny_qwen_image, group_size=2)


@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
def test_resumed_run_continues_bitwise(tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict, model: dict):
    options = {"model": model, "digen": EMA | {"kl": {"coef": 0.1}}, "optim": {"lr_warmup_steps": 4}}
    straight, first = make_engine(tiny_qwen_image, **options), make_engine(tiny_qwen_image, **options)
    train(first, batch, 3)
    first.save_checkpoint(str(tmp_path / "step_3"), global_step=3)
    drawn = torch.rand(3)

    expected = train(straight, batch, 6)[-1]
    resumed = make_engine(tiny_qwen_image, **options)
    resumed.load_checkpoint(str(tmp_path / "step_3"), del_local_after_load=False)
    assert torch.equal(torch.rand(3), drawn)
    found = train(resumed, batch, 3)[-1]

    assert_equal(weights(resumed), weights(straight))
    assert_equal(weights(resumed, policy="average"), weights(straight, policy="average"))
    assert found["metrics"] == expected["metrics"]
    assert resumed.lr_scheduler.get_last_lr() == straight.lr_scheduler.get_last_lr()
    assert resumed.state.num_updates == 6


def test_checkpoint_of_an_adapter_leaves_the_base_out(tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image, model=LORA)
    train(engine, batch)
    engine.save_checkpoint(str(tmp_path / "step"))
    saved = torch.load(tmp_path / "step" / "model_world_size_1_rank_0.pt", weights_only=False)
    assert saved and all("lora_" in name for name in saved)
    resumed = make_engine(tiny_qwen_image, model=LORA)
    resumed.load_checkpoint(str(tmp_path / "step"), del_local_after_load=False)
    assert_equal(weights(resumed), weights(engine))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": LORA, "fsdp": {"model_dtype": "bf16"}}, "for other base weights than those of .*model_dtype"),
        ({"model": LORA | {"lora_rank": 2}}, r"14 tensors .* got 14, which differ e\.g\. in .*lora_A"),
        ({"model": LORA | {"target_modules": ["attn.to_q"]}}, "tensors that this run trains, got 14"),
        ({}, "the 77 tensors that this run trains, got 14"),
    ],
    ids=["dtype", "rank", "targets", "full"],
)
def test_checkpoint_of_another_adapter_or_base_is_refused(
    tiny_qwen_image: Path, tmp_path: Path, changes: dict, message: str
):
    make_engine(tiny_qwen_image, model=LORA).save_checkpoint(str(tmp_path / "step"))
    with pytest.raises(ValueError, match=message):
        make_engine(tiny_qwen_image, **changes).load_checkpoint(str(tmp_path / "step"), del_local_after_load=False)


def test_shards_saved_on_any_device_are_loaded_on_the_host(tiny_qwen_image: Path, tmp_path: Path, monkeypatch):
    engine = make_engine(tiny_qwen_image, model=LORA)
    engine.save_checkpoint(str(tmp_path / "step"))
    devices = []
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *args, **given: devices.append(given["map_location"]) or load(*args, **given)
    )
    engine.load_checkpoint(str(tmp_path / "step"), del_local_after_load=False)
    assert devices == ["cpu"] * 4


def test_checkpoints_of_the_start_before_count_in_the_same_run(tiny_qwen_image: Path, tmp_path: Path):
    def start(run: str, *steps: int, resumed: Path | None = None) -> list[int]:
        engine = make_engine(tiny_qwen_image)
        if resumed is not None:
            engine.load_checkpoint(str(resumed), del_local_after_load=False)
        for step in steps:
            engine.save_checkpoint(str(tmp_path / run / f"step_{step}" / "actor"), max_ckpt_to_keep=2)
        return sorted(int(path.parent.name[5:]) for path in (tmp_path / run).glob("step_*/actor"))

    assert start("run", 8, 9, 10) == [9, 10]
    assert start("run", 11, resumed=tmp_path / "run" / "step_10" / "actor") == [10, 11]
    assert start("other", 11, resumed=tmp_path / "run" / "step_11" / "actor") == [11]
    assert start("run") == [10, 11], "a run elsewhere leaves them"


def test_a_kept_checkpoint_stays_and_does_not_count(tiny_qwen_image: Path, tmp_path: Path):
    engine = make_engine(tiny_qwen_image)

    def save(step: int) -> list[int]:
        engine.save_checkpoint(str(tmp_path / f"step_{step}" / "actor"), max_ckpt_to_keep=1)
        return [number for number in range(1, 6) if (tmp_path / f"step_{number}" / "actor").exists()]

    assert save(1) == [1]
    engine.checkpoint_manager.kept = frozenset({str(tmp_path / "step_1" / "actor")})
    assert save(2) == [1, 2] and save(3) == [1, 3]
    engine.checkpoint_manager.kept = frozenset({str(tmp_path / "step_3" / "actor")})
    assert save(4) == [3, 4], "the one that was kept is an old one now"
    assert save(5) == [3, 5]


def test_saving_a_step_again_replaces_it(tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image)
    engine.save_checkpoint(str(tmp_path / "step"))
    (tmp_path / "step" / "stale").touch()
    train(engine, batch)
    engine.save_checkpoint(str(tmp_path / "step"))
    assert not (tmp_path / "step" / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_leftover_of_a_killed_save_goes_with_the_next(tiny_qwen_image: Path, tmp_path: Path):
    (tmp_path / "step.partial-0123abcd").mkdir()
    make_engine(tiny_qwen_image).save_checkpoint(str(tmp_path / "step"))
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_failed_save_leaves_the_old_checkpoint(tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image, save=["model", "optimizer", "extra", "hf_model"])
    engine.save_checkpoint(str(tmp_path / "step"))
    saved = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "step").iterdir()}
    train(engine, batch)
    engine.optimizer.state["unsavable"] = RefusesToBeWritten()
    with pytest.raises(RuntimeError, match=r"trainer.default_local_dir.*older checkpoints are untouched"):
        engine.save_checkpoint(str(tmp_path / "step"))
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "step").iterdir()} == saved
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    make_engine(tiny_qwen_image).load_checkpoint(str(tmp_path / "step"), del_local_after_load=False)


def test_full_disk_raises_and_leaves_nothing(tiny_qwen_image: Path, tmp_path: Path):
    names = ("model", "hf_model")
    engines = {name: make_engine(tiny_qwen_image, save=[name]) for name in names}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # no file of this process may grow beyond; Python ignores the signal
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        for name, engine in engines.items():
            with pytest.raises(RuntimeError, match=r"make room on the disk, or let trainer\.default"):
                engine.save_checkpoint(str(tmp_path / name / "actor"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [list((tmp_path / name).iterdir()) for name in names] == [[], []]


# -- exports ----------------------------------------------------------------------------------------------
def test_transformer_export_loads_in_diffusers(tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image, save=["model", "hf_model"])
    train(engine, batch)
    engine.save_checkpoint(str(tmp_path / "step"))
    loaded = QwenImageTransformer2DModel.from_pretrained(tmp_path / "step" / "transformer")
    assert_equal(loaded.state_dict(), weights(engine))


def test_large_export_is_cut_into_files(tiny_qwen_image: Path, tmp_path: Path):
    module = plain_transformer(tiny_qwen_image)
    tensors = module.state_dict()
    save_transformer(module, tensors.items(), tmp_path / "out", writes=True, max_file_bytes=100_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"diffusion_pytorch_model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    assert all(path.stat().st_size < 110_000 for path in (tmp_path / "out").glob("*.safetensors"))
    assert_equal(QwenImageTransformer2DModel.from_pretrained(tmp_path / "out").state_dict(), tensors)


def test_adapter_export_loads_in_peft_in_diffusers_and_here(tiny_qwen_image: Path, tmp_path: Path):
    engine = make_engine(tiny_qwen_image, model=LORA, save=["hf_model"])
    perturb(engine)
    adapter = weights(engine)
    engine.save_checkpoint(str(tmp_path / "step"))
    folder = tmp_path / "step" / "lora_adapter"
    assert not (tmp_path / "step" / "transformer").exists()

    again = make_engine(tiny_qwen_image, model={"lora_adapter_path": str(folder)})
    assert_equal(weights(again), adapter)
    assert again.model_config.lora_rank == 4

    merged = PeftModel.from_pretrained(plain_transformer(tiny_qwen_image), folder).merge_and_unload().state_dict()
    pipeline = QwenImagePipeline.from_pretrained(tiny_qwen_image, text_encoder=None, vae=None)
    pipeline.load_lora_weights(folder)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    for name, value in pipeline.transformer.state_dict().items():
        torch.testing.assert_close(value, merged[name], rtol=1e-5, atol=1e-6)
    assert json.loads((folder / "adapter_config.json").read_text())["lora_alpha"] == 8
