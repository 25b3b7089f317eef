# SPDX-License-Identifier: Apache-2.0
"""Starts with an adapter: what ranks, replicas and exports cannot take is refused before Ray starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.engine.harness import digen_section
from verl_digen.engine.build import add_adapter
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models import load_model
from verl_digen.preflight.notes import notes
from verl_digen.preflight.rules import check

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
    assert any("lora_dropout=0.5 is 0 here" in note for note in notes(config)) == (name == "dropout")
    model = DiffusionModelConfig(path=str(tiny_qwen_image), digen=digen_section(), lora_adapter_path=str(folder))  # type: ignore[arg-type]
    module = add_adapter(load_model(tiny_qwen_image).load_transformer(torch.float32), model, 0)
    assert all(value.count_nonzero() for key, value in module.named_parameters() if "lora_B" in key)
    assert not any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in module.modules())


@pytest.mark.parametrize(
    ("edit", "given", "message"),
    [
        (
            renamed("base_model.model.", "transformer."),
            {},
            "the 8 tensors of the adapter .* 0 fit: it has",
        ),
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
    config = start(*runnable, f"{MODEL}.lora_adapter_path={folder}", f"{MODEL}.lora_alpha=99")
    found = " ".join(notes(config))
    assert "its lora_alpha=8 is taken, not lora_alpha=99" in found and "{'use_of_tomorrow': True} of its" in found
    for word in ("target_modules=[to_v]", "exclude_modules=[to_q]"):
        with pytest.raises(ValueError, match=f"{word.partition('=')[0]} must be left out with lora_adapter_path"):
            check(start(*runnable, f"{MODEL}.lora_adapter_path={folder}", f"{MODEL}.{word}"))


def test_all_weights_may_train_under_a_recipe_of_an_adapter(start, runnable):
    check(start(*["recipe=digen_qwen_image" if "recipe=" in one else one for one in runnable], f"{MODEL}.lora_rank=0"))
