# SPDX-License-Identifier: Apache-2.0
"""Starts with an adapter: what ranks, replicas and exports cannot take is refused before Ray starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.engine.harness import digen_section, full, make_engine, process_group
from verl_digen.engine.build import add_adapter
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models import load_model
from verl_digen.preflight.adapter import check_adapter
from verl_digen.preflight.rules import check, notes
from verl_digen.preflight.start_config import StartConfig

pytestmark = pytest.mark.slow

MODEL = "actor_rollout_ref.model"
WEIGHTS = "adapter_model.safetensors"
Edit = Callable[[Path], object]


@pytest.fixture
def adapter(tiny_qwen_image: Path, tmp_path: Path) -> Callable[..., Path]:
    def make(edit: Edit | None = None, **settings: Any) -> Path:
        own = {"r": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_k"], "init_lora_weights": False, **settings}
        network: Any = load_model(tiny_qwen_image).load_transformer(torch.float32)
        get_peft_model(network, LoraConfig(**own)).save_pretrained(str(tmp_path / "adapter"))
        if edit is not None:
            edit(tmp_path / "adapter")
        return tmp_path / "adapter"

    return make


def tensors(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Edit:
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def settings(**values: Any) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


def as_bin(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def renamed(old: str, new: str) -> Edit:
    return tensors(lambda found: {name.replace(old, new): value for name, value in found.items()})


ACCEPTED = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"to_q": 2}, "alpha_pattern": {"to_q": 3}},
    "fp16": {"edit": tensors(lambda found: {name: value.half() for name, value in found.items()})},
    "bin": {"edit": as_bin},
    "dropout": {"lora_dropout": 0.5},
    "task": {"edit": settings(task_type="CAUSAL_LM")},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_adapters_of_the_network_are_accepted_and_loaded_whole(start, runnable, adapter, tiny_qwen_image, name: str):
    folder = adapter(**ACCEPTED[name])
    config = start(*runnable, f"{MODEL}.lora_adapter_path={folder}")
    check(config)
    assert any("lora_dropout=0.5 is 0 here" in note for note in notes(StartConfig(config))) == (name == "dropout")
    model = DiffusionModelConfig(path=str(tiny_qwen_image), digen=digen_section(), lora_adapter_path=str(folder))  # type: ignore[arg-type]
    module = add_adapter(load_model(tiny_qwen_image).load_transformer(torch.float32), model, 0)
    assert all(value.count_nonzero() for key, value in module.named_parameters() if "lora_B" in key)
    assert not any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in module.modules())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("patterns", "one alpha/rank .*vllm_omni, got 'alpha/rank 1.5; alpha/rank 2'; .*merge=true"),
        ("dora", "must hold plain LoRA .*vllm_omni, got 'DoRA, alpha/rank 2'; set .*name=diffusers"),
        ("rslora", ""),
    ],
)
def test_vllm_omni_takes_adapters_that_its_layers_compute_as_they_train(start, runnable, adapter, name, message: str):
    words = f"{MODEL}.lora_adapter_path={adapter(**ACCEPTED[name])}", "actor_rollout_ref.rollout.name=vllm_omni"
    run = StartConfig(start(*runnable, *words))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_adapter(run)
    run.config.actor_rollout_ref.model.lora.merge = True
    check_adapter(run)


@pytest.mark.parametrize(
    ("edit", "given", "message"),
    [
        (renamed("base_model.model.", "transformer."), {}, "the 8 tensors of the adapter .* 0 fit: it has"),
        (tensors(lambda found: {k: v for k, v in found.items() if "blocks.0" in k}), {}, "of whose 4 tensors 4 fit"),
        (tensors(lambda found: found | {"more": torch.zeros(1)}), {}, r"of whose 9 tensors 8 fit: it has more \[1\]"),
        (settings(r=8), {}, r"0 fit: .*lora_A.weight \[4, 32\].* takes .*lora_A.weight \[8, 32\]"),
        (settings(target_modules=["q_proj", "v_proj"]), {}, "must name layers of the network .*'q_proj', 'v_proj'"),
        (lambda folder: (folder / WEIGHTS).unlink(), {}, "must hold an adapter's weights, adapter_model.safetensors"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"short"), {}, "must hold whole weight files, got .* 5 bytes"),
        (settings(r="4"), {}, "r >= 1 and lora_alpha > 0, got {'r': '4', "),
        (settings(lora_alpha=None), {}, "r >= 1 and lora_alpha > 0, got {.*'lora_alpha': None"),
        (settings(target_modules=None), {}, "must have target_modules, got None; "),
        (settings(alora_invocation_tokens=[1]), {}, "alora_invocation_tokens in the adapter_config.json .* left out"),
        (settings(velora_config={}), {}, "velora_config in the adapter_config.json .* left out"),
        (settings(peft_type="LOHA"), {}, "must hold a LoRA adapter, got 'LOHA'"),
        (settings(init_lora_weights="pissa_niter_4"), {}, "init_lora_weights=pissa_niter_4 changes the base's weights"),
        (None, {"bias": "lora_only"}, "bias in the adapter_config.json of .*path must be left out"),
        (None, {"lora_bias": True}, "lora_bias in the adapter_config.json"),
        (None, {"modules_to_save": ["proj_out"]}, "modules_to_save in the adapter_config.json"),
    ],
)
def test_other_adapters_are_refused(start, runnable, adapter, edit: Edit | None, given: dict[str, Any], message: str):
    folder = adapter(edit, **given)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        check(start(*runnable, f"{MODEL}.lora_adapter_path={folder}"))


LAYERS = ("transformer_blocks.0.attn.to_q", "img_in")


def lora_file(folder: Path, start: str, ends: tuple[str, str], alpha: bool) -> None:
    """Write a LoRA of rank 2 as other trainers do."""
    found = {}
    for layer, (height, width) in zip(LAYERS, ((32, 32), (32, 16)), strict=True):
        stem = start + (layer.replace(".", "_") if start.endswith("_") else layer)
        found[f"{stem}.{ends[0]}.weight"], found[f"{stem}.{ends[1]}.weight"] = (
            torch.ones(2, width),
            torch.ones(height, 2),
        )
        found |= {f"{stem}.alpha": torch.tensor(1.0)} if alpha else {}
    folder.mkdir(exist_ok=True)
    save_file(found, folder / "pytorch_lora_weights.safetensors")


FORMS = {
    "diffusers": ("transformer.", ("lora_A", "lora_B"), False),
    "kohya": ("lora_unet_", ("lora_down", "lora_up"), True),
    "ai-toolkit": ("diffusion_model.", ("lora_A", "lora_B"), False),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_lora_file_of_each_form_starts_an_engine(start, runnable, tiny_qwen_image, tmp_path, form: str):
    lora_file(tmp_path / "sft", *FORMS[form])
    words = [f"{MODEL}.lora_adapter_path={tmp_path}/sft", *runnable]
    config = start(*("recipe=digen_qwen_image" if "recipe=" in word else word for word in words))
    check(config)
    said = notes(StartConfig(config))
    assert any("lora_rank=2 in place of 32 and lora_alpha=2 in place of 64 of the recipe" in note for note in said)
    with process_group(0, 1, f"{tmp_path}/store"):
        engine = make_engine(tiny_qwen_image, model={"lora_adapter_path": f"{tmp_path}/sft"})
        up = [full(value) for name, value in engine.module.named_parameters() if "lora_B" in name]
    assert len(up) == len(LAYERS) and all(value.eq(1).all() for value in up)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("lora_rank=8", "lora_rank must be that of .*, 2, got 8"),
        ("lora.rank=8", "lora.rank must be that of lora_adapter_path, 2, got 8"),
        ("lora_alpha=9", "lora_alpha must be that of .*, 2, got 9"),
    ],
)
def test_a_typed_rank_or_alpha_that_is_not_the_adapter_s_is_refused(start, runnable, tmp_path, word: str, message: str):
    lora_file(tmp_path / "sft", *FORMS["kohya"])
    with pytest.raises(ValueError, match=f"{MODEL}.{message}; leave out"):
        check(start(*runnable, f"{MODEL}.lora_adapter_path={tmp_path}/sft", f"++{MODEL}.{word}"))


def test_a_lora_of_another_network_is_refused_with_numbers(start, runnable, tmp_path):
    lora_file(tmp_path / "sft", "transformer.blocks.", ("lora_A", "lora_B"), False)
    with pytest.raises(ValueError, match="a LoRA of this Qwen-Image, but 2 of 2 layers in"):
        check(start(*runnable, f"{MODEL}.lora_adapter_path={tmp_path}/sft"))


def test_a_checkpoint_in_one_file_is_refused_with_the_way_to_convert_it(start, runnable, tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(
        ValueError, match=r"must be a folder in the diffusers format, got a file, .*from_single_file\('"
    ):
        check(start(*runnable, f"{MODEL}.path={tmp_path}/model.safetensors"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lora_rank=4", "target_modules=[norm_q]"], r"target_modules must name layers .* got \['norm_q'\]: Target"),
        (["lora_rank=4", "target_modules=[attn]"], r"target_modules must name layers .* such as .*, got \['attn'\]"),
        (["lora_rank=4", "target_modules=[to_q]", "exclude_modules=[to_q]"], r"without \['to_q'\]"),
        (["target_modules=[to_q]"], r"target_modules must be left out with lora_rank=0"),
        (["exclude_modules=[to_q]"], r"exclude_modules must be left out with lora_rank=0"),
        (["lora.merge=true"], r"lora.merge must be left out with lora_rank=0"),
        (["lora_alpha=16"], r"lora_alpha must be left out with lora_rank=0"),
    ],
)
def test_settings_of_no_adapter_are_refused(start, runnable, words: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        check(start(*runnable, *(f"{MODEL}.{word}" for word in words)))


def test_settings_beside_a_file_that_has_them_are_refused_or_noted(start, runnable, adapter):
    folder = adapter(settings(use_of_tomorrow=True))
    found = " ".join(notes(StartConfig(start(*runnable, f"{MODEL}.lora_adapter_path={folder}"))))
    assert "{'use_of_tomorrow': True} of its" in found
    with pytest.raises(ValueError, match="lora_alpha must be that of lora_adapter_path, 8, got 99"):
        check(start(*runnable, f"{MODEL}.lora_adapter_path={folder}", f"{MODEL}.lora_alpha=99"))
    for word in ("target_modules=[to_v]", "exclude_modules=[to_q]"):
        with pytest.raises(ValueError, match=f"{word.partition('=')[0]} must be left out with lora_adapter_path"):
            check(start(*runnable, f"{MODEL}.lora_adapter_path={folder}", f"{MODEL}.{word}"))


def test_all_weights_may_train_under_a_recipe_of_an_adapter(start, runnable):
    check(start(*["recipe=digen_qwen_image" if "recipe=" in one else one for one in runnable], f"{MODEL}.lora_rank=0"))
