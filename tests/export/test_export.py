# SPDX-License-Identifier: Apache-2.0
"""Exports of a checkpoint equal what the engine holds, and load in diffusers and peft."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel, WanPipeline, WanTransformer3DModel
from huggingface_hub import RepoUrl
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.harness import LORA, assert_equal, make_engine, on_two_ranks, perturb, process_group, weights
from tests.engine.serial import plain_transformer
from tests.export.runs import digen, save_run, trained_engine
from tests.tiny_models import build_tiny
from verl_digen.engine.driver_checkpoint import export_checkpoint
from verl_digen.models import load_model
from verl_digen.observe.run_files import POINTER
from verl_digen.tools.export.formats import save_transformer
from verl_digen.tools.export.policy import _files_of
from verl_digen.tools.export.saved_run import open_run, saved_steps

POLICIES = {"current": "current", "ema": "average"}
"""Policy as typed -> the engine's name."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_qwen_image: Path) -> Iterator[dict[str, tuple[Path, dict]]]:
    """Training, full or lora -> (run's folder, policy -> the engine's tensors)."""
    found = {}
    with process_group(0, 1, str(tmp_path_factory.mktemp("rendezvous") / "store")):
        for name, model in (("full", {}), ("lora", LORA)):
            folder = tmp_path_factory.mktemp(name)
            engine = trained_engine(tiny_qwen_image, model)
            save_run(engine, folder, tiny_qwen_image, model)
            found[name] = folder, {typed: weights(engine, policy=own) for typed, own in POLICIES.items()}
        engine.model_config.lora["merge"] = True
        found["merged"] = folder, {typed: weights(engine, policy=own) for typed, own in POLICIES.items()}
    yield found


@pytest.mark.parametrize("policy", POLICIES)
def test_networks_are_those_of_the_engine(saved, policy: str, tmp_path: Path):
    run, expected = saved["full"]
    assert digen("export", run, "--policy", policy, "--output", tmp_path / "out") == 0
    loaded = QwenImageTransformer2DModel.from_pretrained(tmp_path / "out" / "transformer")
    assert_equal(loaded.state_dict(), expected[policy])
    assert not torch.equal(expected["ema"]["img_in.weight"], expected["current"]["img_in.weight"])


@pytest.mark.parametrize("policy", POLICIES)
def test_merged_weights_are_base_and_adapter(saved, policy: str, tmp_path: Path, tiny_qwen_image: Path):
    run, expected = saved["merged"]
    assert digen("export", run, "--policy", policy, "--format", "merged", "--output", tmp_path / "out") == 0
    found = QwenImageTransformer2DModel.from_pretrained(tmp_path / "out" / "transformer").state_dict()
    assert digen("export", run, "--policy", policy, "--format", "peft", "--output", tmp_path / "peft") == 0
    plain = PeftModel.from_pretrained(plain_transformer(tiny_qwen_image), tmp_path / "peft").merge_and_unload()
    for name, value in expected[policy].items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(plain.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_a_merged_weight_is_rounded_once(saved, tmp_path: Path):
    run, expected = saved["merged"]
    assert digen("export", run, "--format", "merged", "--dtype", "bf16", "--output", tmp_path / "out") == 0
    found = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert_equal(found, {name: value.bfloat16() for name, value in expected["current"].items()})


def picture(pipeline: QwenImagePipeline) -> Tensor:
    """Latents of one prompt."""
    given = {"generator": torch.Generator().manual_seed(3), "height": 64, "width": 64, "num_inference_steps": 3}
    return torch.as_tensor(pipeline("a red circle", output_type="latent", **given)[0])


def test_plain_diffusers_draws_the_same_with_adapter_and_merged_weights(saved, tmp_path: Path, tiny_qwen_image: Path):
    run, _ = saved["lora"]
    for form in ("diffusers", "merged"):
        assert digen("export", run, "--format", form, "--output", tmp_path / form) == 0
    pipeline = QwenImagePipeline.from_pretrained(tiny_qwen_image)
    pipeline.set_progress_bar_config(disable=True)
    untrained = picture(pipeline)
    pipeline.load_lora_weights(tmp_path / "diffusers")
    adapted = picture(pipeline)
    pipeline.unload_lora_weights()
    pipeline.transformer = QwenImageTransformer2DModel.from_pretrained(tmp_path / "merged" / "transformer")
    torch.testing.assert_close(picture(pipeline), adapted, rtol=0, atol=1e-4)
    assert (untrained - adapted).abs().max() > 1e-2


@pytest.mark.parametrize("has_patterns", [False, True])
def test_adapters_of_two_experts_are_loaded_one_by_one(has_patterns: bool, tmp_path: Path):
    path, model = build_tiny("wan2.2_a14b", tmp_path / "checkpoint"), {"lora_rank": 2, "lora_alpha": 8}
    if has_patterns:
        layer = r"transformer_2\.blocks\.0\.attn1\.to_q"
        given = {"target_modules": ["to_q", "to_k"], "exclude_modules": "(?!transformer).*to_k"}
        config = LoraConfig(r=2, lora_alpha=8, rank_pattern={layer: 4}, alpha_pattern={layer: 32}, **given)
        get_peft_model(load_model(path).load_transformer(torch.float32), config).save_pretrained(tmp_path / "begun")
        model = {"lora_adapter_path": str(tmp_path / "begun")}
    with process_group(0, 1, str(tmp_path / "store")):
        engine = make_engine(path, model=model)
        perturb(engine)
        save_run(engine, tmp_path / "run", path, model)
    for form in ("diffusers", "peft", "merged", "comfyui"):
        assert digen("export", tmp_path / "run", "--format", form, "--output", tmp_path / form) == 0
    pipeline = WanPipeline.from_pretrained(path)
    pipeline.load_lora_weights(tmp_path / "diffusers" / "transformer")
    pipeline.load_lora_weights(tmp_path / "diffusers" / "transformer_2", load_into_transformer_2=True)
    for name in ("transformer", "transformer_2"):
        network = getattr(pipeline, name)
        untrained = WanTransformer3DModel.from_pretrained(path / name)
        merged = WanTransformer3DModel.from_pretrained(tmp_path / "merged" / name).state_dict()
        layers = {key: value for key, value in untrained.state_dict().items() if not torch.equal(value, merged[key])}
        assert layers
        network.fuse_lora()
        network.unload_lora()
        found = PeftModel.from_pretrained(untrained, tmp_path / "peft" / name).merge_and_unload().state_dict()
        for key in layers:
            torch.testing.assert_close(network.state_dict()[key], merged[key], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found[key], merged[key], rtol=1e-5, atol=1e-6)
        assert (tmp_path / "comfyui" / f"{name}.safetensors").is_file()


# -- two ranks --------------------------------------------------------------------------------------------
def sharded_full(path: Path, folder: Path) -> dict[str, dict[str, Tensor]]:
    return saved_by_ranks(path, folder / "full", {})


def sharded_lora(path: Path, folder: Path) -> dict[str, dict[str, Tensor]]:
    return saved_by_ranks(path, folder / "lora", LORA)


def replicated(path: Path, folder: Path) -> dict[str, dict[str, Tensor]]:
    return saved_by_ranks(path, folder / "replicated", {}, fsdp={"fsdp_size": 1})


def saved_by_ranks(path: Path, folder: Path, model: dict, **options) -> dict[str, dict[str, Tensor]]:
    """Save a run; returns what the engine exports, by policy."""
    engine = trained_engine(path, model, **options)
    save_run(engine, folder, path, model)
    return {typed: weights(engine, policy=own) for typed, own in POLICIES.items()}


def test_shards_of_two_ranks_make_whole_tensors(tmp_path: Path, tiny_qwen_image: Path, capsys):
    expected = on_two_ranks([sharded_full, sharded_lora, replicated], tiny_qwen_image, tmp_path)
    for name, folder in (("sharded_full", "full"), ("replicated", "replicated")):
        for policy, tensors in expected[name].items():
            out = tmp_path / f"{name}-{policy}"
            assert digen("export", tmp_path / folder, "--policy", policy, "--output", out) == 0
            assert_equal(load_file(out / "transformer" / "diffusion_pytorch_model.safetensors"), tensors)
    for policy, tensors in expected["sharded_lora"].items():
        out = tmp_path / f"lora-{policy}"
        assert digen("export", tmp_path / "lora", "--policy", policy, "--format", "peft", "--output", out) == 0
        assert_equal(load_file(out / "adapter_model.safetensors"), tensors)
    (tmp_path / "full" / "global_step_2" / "actor" / "__1_0.distcp").unlink()
    assert digen("export", tmp_path / "full", "--output", tmp_path / "missing") == 2
    assert "must hold all files of one save" in capsys.readouterr().err and not (tmp_path / "missing").exists()


# -- refusals ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        ("full", ["--step", 7], "--step must be one of 2, got 7"),
        ("full", ["--policy", "old"], "--policy must be one of current, ema, got 'old'"),
        ("full", ["--format", "peft"], "--format must be one of diffusers for a run that trained all weights"),
        ("full", ["--format", "merged"], "--format must be one of diffusers for a run that trained all weights"),
        ("lora", ["--format", "onnx"], "--format must be one of diffusers, peft, merged"),
        ("lora", ["--base", "/nowhere"], "actor_rollout_ref.model.path must be a folder"),
    ],
)
def test_what_cannot_be_exported_is_refused(saved, run: str, words: list, message: str, tmp_path: Path, capsys):
    assert digen("export", saved[run][0], *words, "--output", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path, capsys):
    assert digen("export", tmp_path) == 2
    assert "trainer.save_freq" in capsys.readouterr().err
    assert digen("export", tmp_path / "nowhere") == 2
    assert "RUN must be the folder of a run" in capsys.readouterr().err


def test_an_output_with_files_is_refused(saved, tmp_path: Path, capsys):
    (tmp_path / "kept").write_text("mine")
    assert digen("export", saved["full"][0], "--output", tmp_path) == 2
    assert "--output must be a new or an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    (tmp_path / "out.partial").mkdir()
    assert digen("export", saved["full"][0], "--output", tmp_path / "out") == 2
    assert "out.partial' must not be there: another command writes it, or was killed" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing(saved, tmp_path: Path, monkeypatch, capsys):
    def no_space(*args, **given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verl_digen.tools.export.formats.save_file", no_space)
    assert digen("export", saved["full"][0], "--output", tmp_path / "out") == 2
    assert "nothing was exported" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_base_that_a_run_named_by_a_relative_path_is_found_from_elsewhere(saved, tmp_path: Path, monkeypatch):
    shutil.copytree(saved["lora"][0], tmp_path / "run")
    described = tmp_path / "run/global_step_2/run.json"
    found = json.loads(described.read_text())
    assert found["cwd"] == os.getcwd()
    base = Path(found["config"]["actor_rollout_ref"]["model"]["path"])
    found["config"]["actor_rollout_ref"]["model"]["path"] = base.name
    described.write_text(json.dumps(found | {"cwd": str(base.parent)}))
    monkeypatch.chdir(tmp_path)
    assert open_run(Path("run"), None, None).model_config.local_path == str(base)
    described.write_text(json.dumps(found | {"cwd": str(tmp_path)}))
    with pytest.raises(ValueError, match="--base names the base checkpoint where it is now"):
        open_run(Path("run"), None, None)


def test_a_checkpoint_without_the_config_of_its_run_is_refused(saved, tmp_path: Path):
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "global_step_2" / "actor").symlink_to(saved["lora"][0] / "global_step_2" / "actor")
    said = r"run\.json.* must be there, the config of the run.*; take another checkpoint"
    with pytest.raises(ValueError, match=said):
        open_run(tmp_path, None, None)
    (tmp_path / "global_step_2" / "run.json").touch()
    with pytest.raises(ValueError, match=r"run\.json must be JSON, .*, got b''; take another checkpoint"):
        open_run(tmp_path, None, None)


def test_a_checkpoint_of_an_earlier_format_is_refused(saved, tmp_path: Path, capsys):
    shutil.copytree(saved["lora"][0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "global_step_2" / "actor" / "model_world_size_1_rank_0.pt").touch()
    assert digen("export", tmp_path) == 2
    assert "`digen export` of the version that wrote it (run.json)" in capsys.readouterr().err


def test_a_large_export_is_cut_into_files(tiny_qwen_image: Path, tmp_path: Path):
    module = plain_transformer(tiny_qwen_image)
    tensors = module.state_dict()
    save_transformer(module, tensors.items(), tmp_path / "out", max_file_bytes=100_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"diffusion_pytorch_model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    assert all(path.stat().st_size < 110_000 for path in (tmp_path / "out").glob("*.safetensors"))
    assert_equal(QwenImageTransformer2DModel.from_pretrained(tmp_path / "out").state_dict(), tensors)
    index = json.loads((tmp_path / "out" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())


def test_an_exported_adapter_begins_a_run_with_its_rank_and_weights(saved, tmp_path: Path, tiny_qwen_image: Path):
    run, _ = saved["lora"]
    assert digen("export", run, "--format", "peft", "--output", tmp_path / "out") == 0
    with process_group(0, 1, str(tmp_path / "store")):
        again = make_engine(tiny_qwen_image, model={"lora_adapter_path": str(tmp_path / "out")})
        assert again.model_config.lora_rank == LORA["lora_rank"]
        expected = load_file(tmp_path / "out" / "adapter_model.safetensors")
        assert_equal(weights(again), expected)
    assert digen("export", run, "--format", "peft", "--dtype", "bf16", "--output", tmp_path / "half") == 0
    found = load_file(tmp_path / "half" / "adapter_model.safetensors")
    assert_equal(found, {name: value.bfloat16() for name, value in expected.items()})


def test_a_copy_of_the_base_in_fp16_is_not_the_base(tmp_path: Path):
    full = tmp_path / "diffusion_pytorch_model.safetensors"
    for file in (full, tmp_path / "diffusion_pytorch_model.fp16.safetensors"):
        save_file({"w": torch.zeros(1)}, file)
    assert _files_of(tmp_path) == [full]
    full.unlink()
    with pytest.raises(ValueError, match="must hold weights as safetensors, got 'none'"):
        _files_of(tmp_path)


def test_weights_have_the_dtype_of_the_base_unless_another_is_asked_for(saved, tmp_path: Path, tiny_qwen_image: Path):
    base = shutil.copytree(tiny_qwen_image, tmp_path / "base")
    file = base / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(file).items()}, file)
    for name, form in (("full", "diffusers"), ("lora", "merged")):
        given = ["--base", base, "--format", form, "--output", tmp_path / name]
        assert digen("export", saved[name][0], *given) == 0
        found = load_file(tmp_path / name / "transformer" / file.name)
        assert {value.dtype for value in found.values()} == {torch.bfloat16}


def test_an_export_is_uploaded_into_a_repository_that_may_be_there(saved, tmp_path: Path, monkeypatch, capsys):
    class Hub:
        def create_repo(self, repo: str, *, exist_ok: bool) -> RepoUrl:
            assert exist_ok
            return RepoUrl(f"https://huggingface.co/{repo}")

        def upload_folder(self, *, folder_path: Path, repo_id: str, commit_message: str) -> None:
            assert (folder_path / "README.md").is_file() and commit_message == f"digen export {folder_path.name}"
            if repo_id == "me/closed":
                raise OSError("403 Forbidden")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    given = "export", saved["lora"][0], "--output"
    assert digen(*given, tmp_path / "a", "--push-to-hub", "me/open") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [str(tmp_path / "a"), "https://huggingface.co/me/open"]
    assert digen(*given, tmp_path / "b", "--push-to-hub", "me/closed") == 2
    assert f"{tmp_path / 'b'} is complete, but was not uploaded: 403 Forbidden; see HF_TOKEN" in capsys.readouterr().err


def test_the_newest_checkpoint_is_the_one_that_the_run_has_published(saved, tmp_path: Path):
    for step in (10, 2, 9):
        shutil.copytree(saved["lora"][0] / "global_step_2", tmp_path / f"global_step_{step}")
    (tmp_path / POINTER).write_text("9")
    assert saved_steps(tmp_path) == [2, 9, 10]
    assert open_run(tmp_path, None, None).step == 9, "the other one is being written"
    (tmp_path / POINTER).unlink()
    assert open_run(tmp_path, None, None).step == 10


def test_a_run_that_saves_hf_model_exports_each_checkpoint(saved, tmp_path: Path, monkeypatch):
    shutil.copytree(saved["full"][0], tmp_path, dirs_exist_ok=True)
    export_checkpoint(tmp_path / "global_step_2")
    loaded = QwenImageTransformer2DModel.from_pretrained(tmp_path / "global_step_2/actor/huggingface/transformer")
    assert_equal(loaded.state_dict(), saved["full"][1]["current"])
    (fails := tmp_path / "python").write_text("#!/bin/sh\necho no room >&2\nexit 2\n")
    fails.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fails))
    with pytest.raises(OSError, match="no room"):
        export_checkpoint(tmp_path / "global_step_2")
