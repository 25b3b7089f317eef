# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.model`."""

import json
import pickle
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests.engine.harness import digen_section
from verl_digen.config import DigenConfig
from verl_digen.model_config import DiffusionModelConfig


def config(checkpoint: Path, **changes) -> DiffusionModelConfig:
    return DiffusionModelConfig(**({"path": str(checkpoint), "digen": digen_section()} | changes))


def test_verl_builds_it_from_the_composed_config(tiny_qwen_image: Path):
    composed = OmegaConf.create(
        {
            "digen": digen_section(seed=7, reward={"functions": {"jpeg": 1.0}}),
            "model": {
                "_target_": "verl_digen.model_config.DiffusionModelConfig",
                "path": str(tiny_qwen_image),
                "digen": "${digen}",
                "lora": {"rank": 8, "alpha": 16, "merge": True},
                "target_modules": ["attn.to_q"],
            },
        }
    )
    model = instantiate(composed.model, _convert_="partial")
    assert isinstance(model.digen, DigenConfig)
    assert (model.digen.seed, model.digen.reward.functions) == (7, {"jpeg": 1.0})
    assert (model.lora_rank, model.lora_alpha, model.merges_lora) == (8, 16, True)
    assert model.lora_config().target_modules == {"attn.to_q"}
    assert model.adapter_config() is None  # replicas get merged weights


def test_what_verl_reads_is_there(tiny_qwen_image: Path):
    model = config(tiny_qwen_image)
    assert model.hf_config.model_type == "QwenImagePipeline"
    assert model.get("use_remove_padding", True) is False
    assert model.get("custom_chat_template", None) is None
    assert model.lora.get("merge", True) is False
    assert model.get_processor() is None
    model.model_type = "diffusion_model"  # verl's training worker sets it
    assert pickle.loads(pickle.dumps(model)).digen == model.digen


def test_lora_targets_default_to_the_model_s(tiny_qwen_image: Path):
    assert config(tiny_qwen_image).adapter_config() is None, "full training"
    adapter = config(tiny_qwen_image, lora_rank=4).adapter_config()
    assert adapter is not None
    assert "attn.to_q" in adapter.target_modules and adapter.r == 4


@pytest.mark.parametrize("given", [{"lora_rank": 8}, {"lora": {"rank": 8}}, {"lora_rank": 8, "lora": {"rank": 8}}])
def test_alpha_counts_in_both_spellings(tiny_qwen_image: Path, given: dict):
    nested = given | {"lora": given.get("lora", {}) | {"alpha": 3}}
    for model in (config(tiny_qwen_image, **given, lora_alpha=3), config(tiny_qwen_image, **nested)):
        assert (model.lora_rank, model.lora_config().lora_alpha) == (8, 3)


def test_given_adapter_sets_rank_and_alpha(tiny_qwen_image: Path, tmp_path: Path):
    saved = {"peft_type": "LORA", "r": 3, "lora_alpha": 12, "target_modules": ["attn.to_k"], "inference_mode": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    model = config(tiny_qwen_image, lora_adapter_path=str(tmp_path))
    assert (model.lora_rank, model.lora_alpha) == (3, 12)
    adapter = model.lora_config()
    assert adapter.target_modules == {"attn.to_k"} and adapter.inference_mode is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digen": None}, "`digen:` section"),
        ({"digen": {"sampling": {"num_step": 3}}}, "digen.sampling.num_step"),
        ({"lora_rank": -1}, "actor_rollout_ref.model.lora_rank must be an integer >= 0"),
        ({"lora_rank": 4, "lora": {"rank": 8}}, "lora_rank and lora.rank must not contradict"),
        ({"lora": {"type": "dora"}}, "actor_rollout_ref.model.lora must hold no keys but alpha, merge, rank"),
        ({"lora_adapter_path": "/nowhere"}, "actor_rollout_ref.model.lora_adapter_path must be a LoRA in one"),
        ({"use_remove_padding": True}, "actor_rollout_ref.model.use_remove_padding must be false"),
        ({"path": "/nowhere"}, "actor_rollout_ref.model.path must be a folder"),
    ],
)
def test_bad_values_are_named_by_their_key(tiny_qwen_image: Path, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        config(tiny_qwen_image, **changes)


@pytest.mark.parametrize("given", [{}, {"lora_rank": 4, "lora": {"merge": True}}])
def test_a_base_in_int8_is_one_under_an_adapter(tiny_qwen_image: Path, given: dict):
    with pytest.raises(ValueError, match=r"actor_rollout_ref.model.int8_base must be false without .*, got True; set"):
        config(tiny_qwen_image, int8_base=True, **given)
    assert config(tiny_qwen_image, int8_base=True, lora_rank=4).int8_base
