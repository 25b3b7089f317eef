# SPDX-License-Identifier: Apache-2.0
"""Names of adapters in ComfyUI, against diffusers' converters and against names read in ComfyUI's source."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline, WanPipeline
from huggingface_hub import metadata_load
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.harness import LORA
from tests.export.runs import run_config
from tests.tiny_models import build_tiny
from verl_digen.engine.export import PEFT_PREFIX
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models import load_model
from verl_digen.models.checkpoint import networks_of
from verl_digen.tools.export.comfyui import NAMES, comfyui_tensors
from verl_digen.tools.export.formats import MAX_ROWS, model_card, require_fit, validations
from verl_digen.tools.export.saved_run import SavedRun

RANK, SCALE = 2, 4.0
"""alpha is 8; a power of two, so that diffusers' converters scale without rounding."""

BLOCK = "attn.to_q attn.to_k attn.to_v attn.add_q_proj attn.add_k_proj attn.add_v_proj attn.to_out.0 attn.to_add_out"
FEED_FORWARD = "ff.net.0.proj ff.net.2 ff_context.net.0.proj ff_context.net.2"
KNOWN = {
    # comfy/utils.py, MMDIT_MAP_BLOCK and mmdit_to_diffusers; flux_to_diffusers
    "sd3": {
        f"transformer.transformer_blocks.{n}.{name}" for n in range(4) for name in f"{BLOCK} {FEED_FORWARD}".split()
    },
    "flux_dev": {
        f"transformer.transformer_blocks.{n}.{name}" for n in range(4) for name in f"{BLOCK} {FEED_FORWARD}".split()
    }
    | {f"transformer.single_transformer_blocks.{n}.attn.to_{name}" for n in range(4) for name in "qkv"},
}


def adapter(name: str, folder: Path, targets: list[str] | None = None) -> tuple[str, dict[str, Tensor]]:
    """(pipeline, random adapter of the layers that a run adapts by default) of a tiny checkpoint."""
    model = load_model(build_tiny(name, folder / "checkpoint"))
    network = networks_of(model.load_transformer(torch.float32))[0]
    config = LoraConfig(r=RANK, lora_alpha=8, target_modules=targets or list(model.spec.lora_targets))
    state = get_peft_model_state_dict(get_peft_model(network, config), save_embedding_layers=False)
    generator = torch.Generator().manual_seed(0)
    return model.pipeline, {key: torch.randn(value.shape, generator=generator) for key, value in state.items()}


def exported(pipeline: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    layers = {name.rpartition(".lora_")[0] for name in tensors}
    return comfyui_tensors(pipeline, tensors, dict.fromkeys(layers, SCALE))


@pytest.mark.parametrize(
    ("name", "reader", "more"),
    [("qwen_image", QwenImagePipeline, []), ("wan2.1", WanPipeline, ["ffn.net.0.proj", "ffn.net.2"])],
)
def test_diffusers_reads_the_adapter_back(name: str, reader: type, more: list[str], tmp_path: Path):
    targets = ["to_q", "to_k", "to_v", "to_out.0", *more] if more else None
    pipeline, tensors = adapter(name, tmp_path, targets)
    save_file(exported(pipeline, tensors), tmp_path / "lora.safetensors")
    found = reader.lora_state_dict(str(tmp_path / "lora.safetensors"))
    expected = {f"transformer.{key.removeprefix(PEFT_PREFIX)}": value for key, value in tensors.items()}
    assert found.keys() == expected.keys()
    for layer in {key.rpartition(".lora_")[0] for key in expected}:
        down, up = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
        torch.testing.assert_close(found[up] @ found[down], SCALE * (expected[up] @ expected[down]))


@pytest.mark.parametrize("name", KNOWN)
def test_names_are_those_that_comfyui_maps(name: str, tmp_path: Path):
    pipeline, tensors = adapter(name, tmp_path)
    found = exported(pipeline, tensors)
    layers = {key.rpartition(".lora_down")[0] for key in found if key.endswith(".lora_down.weight")}
    assert layers and layers <= KNOWN[name]
    assert found.keys() == {
        f"{layer}.{end}" for layer in layers for end in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    assert all(found[f"{layer}.alpha"] == 8 for layer in layers)


def test_layers_and_pipelines_that_comfyui_does_not_read_are_refused(tmp_path: Path):
    layer = f"{PEFT_PREFIX}norm_out.linear"
    tensors = {f"{layer}.lora_A.weight": torch.ones(2, 3), f"{layer}.lora_B.weight": torch.ones(3, 2)}
    for pipeline in NAMES:
        with pytest.raises(ValueError, match=r"ones that ComfyUI reads, got 'norm_out\.linear'"):
            exported(pipeline, tensors)
    with pytest.raises(ValueError, match=r"an adapter must be plain LoRA, got .*magnitude_vector'; use --format peft"):
        exported("WanPipeline", {f"{PEFT_PREFIX}blocks.0.attn1.to_q.lora_magnitude_vector": torch.ones(3)})
    with pytest.raises(ValueError, match="got 'HunyuanVideoPipeline'"):
        require_fit(SimpleNamespace(is_lora=True, model=SimpleNamespace(pipeline="HunyuanVideoPipeline")), "comfyui")


# -- model cards, and uploads to a stand-in of the hub's client ----------------------------------------------
def write_metrics(folder: Path, steps: range) -> Path:
    lines = [{"step": step, **({"val/reward": step / 1000} if step % 2 == 0 else {})} for step in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "metrics.jsonl"


def test_card_states_facts_of_the_run(tmp_path: Path, tiny_qwen_image: Path):
    values = run_config(tiny_qwen_image, LORA)
    values["digen"]["reward"] = {"functions": {"ocr": 0.75}}
    config = OmegaConf.create(values)
    section: Any = OmegaConf.to_container(config.actor_rollout_ref.model, resolve=True)
    model = DiffusionModelConfig(**{name: value for name, value in section.items() if name != "_target_"})
    start = {"words": ["recipe=digen_qwen_image"], "at_s": 0, "changes": [], "config": {}}
    (tmp_path / "start.json").write_text(json.dumps(start | {name: [] for name in ("recipes", "notes", "versions")}))
    write_metrics(tmp_path, range(7))
    text = model_card(SavedRun(tmp_path, 4, config, {"torch": "2.13.0"}, model), "ema", "peft")
    for part in (
        "LoRA, rank 4, alpha 8",
        "step 4, policy `ema`, format `peft`",
        "| `ocr` | 0.75 |",
        "| torch | 2.13.0 |",
    ):
        assert part in text
    assert "    recipe=digen_qwen_image" in text
    assert "| 4 | 0.0040 |" in text and "| 6 |" not in text, "a validation after the checkpoint"
    (tmp_path / "README.md").write_text(text)
    metadata = metadata_load(tmp_path / "README.md")
    assert metadata is not None and metadata["tags"] == ["verl-digen", "reinforcement-learning", "lora"]
    assert "license" not in metadata and "base_model" not in metadata, "nothing states them"


def test_a_long_curve_is_thinned_to_its_ends(tmp_path: Path):
    rows = list(validations(write_metrics(tmp_path, range(401)), 400))
    assert len(rows) == MAX_ROWS and rows[0] == (0, "0.0000") and rows[-1] == (400, "0.4000")
    assert list(validations(tmp_path / "nothing", 4)) == []
