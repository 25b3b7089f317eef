# SPDX-License-Identifier: Apache-2.0
"""Model cards, and uploads to a stand-in of the hub's client."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import metadata_load
from omegaconf import OmegaConf

from tests.engine.harness import LORA
from tests.export.runs import run_config
from verl_digen.export.card import MAX_ROWS, model_card, validations
from verl_digen.export.export_command import _push
from verl_digen.export.saved_run import SavedRun
from verl_digen.model_config import DiffusionModelConfig


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
    hydra = tmp_path / "hydra" / "2026-01-01_00-00-00" / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "overrides.yaml").write_text("- recipe=digen_qwen_image\n")
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


def test_an_upload_makes_the_repository_and_sends_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def create_repo(self, repo: str, **given: Any) -> Any:
            calls.append((repo, given))
            return SimpleNamespace(repo_id=f"me/{repo}")

        def upload_folder(self, **given: Any) -> None:
            calls.append(("upload", given))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    _push(tmp_path, "model")
    assert calls[0] == ("model", {"exist_ok": True})
    assert calls[1][1]["folder_path"] == tmp_path and calls[1][1]["repo_id"] == "me/model"
