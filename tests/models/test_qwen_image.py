# SPDX-License-Identifier: Apache-2.0
"""The Qwen-Image model file against diffusers' own pipeline, part by part (the loop: tests/rollout)."""

import copy
import json
from pathlib import Path

import pytest
import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from torch import Tensor, nn

from tests.models.cases import changed
from tests.texts import of_texts
from verl_digen.models import MODELS, load_model
from verl_digen.models.qwen_image import QwenImage, take_one_frame
from verl_digen.types import Condition, Geometry

CPU = torch.device("cpu")
SQUARE = Geometry(height_px=64, width_px=64)
SHORT = "a red circle"
LONG = "two small blue squares left of a red circle on a green background, by Ünal 3"


@pytest.fixture(scope="module")
def model(tiny_qwen_image: Path) -> QwenImage:
    loaded = load_model(tiny_qwen_image)
    assert isinstance(loaded, QwenImage)
    return loaded


@pytest.fixture(scope="module")
def transformer(model: QwenImage) -> nn.Module:
    return model.load_transformer(torch.float32).requires_grad_(False)


@pytest.fixture(scope="module")
def pipeline(tiny_qwen_image: Path) -> QwenImagePipeline:
    loaded = QwenImagePipeline.from_pretrained(tiny_qwen_image)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def conditions(model: QwenImage) -> list[Condition]:
    """Conditions of SHORT, LONG, and the negative prompt."""
    return of_texts(model.load_encoder(torch.float32, CPU))([SHORT, LONG, " "])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- loading ----------------------------------------------------------------------------------------------


def test_a_missing_folder_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.model\.path must be a folder .* got '/nowhere'"):
        load_model("/nowhere")


@pytest.mark.parametrize("pipeline", ["NewPipeline", "QwenImageLayeredPipeline"])
def test_an_unknown_pipeline_is_an_error_that_lists_the_known_ones(tmp_path: Path, pipeline: str) -> None:
    """Whatever its transformer."""
    index = {"_class_name": pipeline, "transformer": ["diffusers", "QwenImageTransformer2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"got a {pipeline}, which is not supported") as error:
        load_model(tmp_path)
    assert all(name in str(error.value) for name in MODELS)


@pytest.mark.parametrize("name", [None, ["package", "OwnPipeline"]])
def test_an_index_that_names_no_pipeline_is_an_error(tmp_path: Path, name: object) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(ValueError, match=r"must hold a model_index\.json that names a pipeline of diffusers"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "model_index.json",
            {"transformer": ["diffusers", "QwenImageLayeredTransformer2DModel"]},
            "must hold a QwenImageTransformer2DModel for Qwen-Image, got QwenImageLayeredTransformer2DModel",
        ),
        ("transformer/config.json", {"guidance_embeds": True}, "guidance_embeds=false for Qwen-Image, got true"),
    ],
)
def test_a_checkpoint_for_another_task_is_an_error(
    tiny_qwen_image: Path, tmp_path: Path, file: str, change: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(changed(tiny_qwen_image, tmp_path / "m", file, change))


# -- text -------------------------------------------------------------------------------------------------


def test_prompts_of_one_length_have_no_mask(model: QwenImage, conditions: list[Condition]) -> None:
    assert set(model.collate([conditions[0], conditions[0]])) == {"embeds"}
    mixed = model.collate(conditions[:2])
    assert mixed["embeds_mask"].sum(1).tolist() == [len(condition["embeds"]) for condition in conditions[:2]]


# -- the shape of the problem -----------------------------------------------------------------------------


def test_the_decoder_computes_what_the_vae_does(model: QwenImage, pipeline: QwenImagePipeline) -> None:
    """The convolutions of one frame as 2D ones, against diffusers' own in 3D."""
    latents = draw(2, pipeline.vae.config.z_dim, 1, 6, 10)
    expected = pipeline.vae.decode(latents, return_dict=False)[0]
    take_one_frame(flat := copy.deepcopy(pipeline.vae))
    torch.testing.assert_close(flat.decode(latents, return_dict=False)[0], expected, atol=1e-5, rtol=0)


# -- the network ------------------------------------------------------------------------------------------


def test_both_guidance_branches_run_in_one_call_unless_split(
    model: QwenImage, transformer: nn.Module, conditions: list[Condition]
) -> None:
    calls: list[int] = []
    handle = transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    x, sigmas = draw(2, 16, 16), torch.tensor([0.6, 0.3])
    model.velocity(transformer, x, sigmas, conditions[:2], [conditions[2]] * 2, 4.0, SQUARE)
    model.velocity(transformer, x, sigmas, conditions[:2], None, 1.0, SQUARE)
    model.velocity(transformer, x, sigmas, conditions[:2], [conditions[2]] * 2, 1.0, SQUARE)
    model.velocity(transformer, x, sigmas, conditions[:2], [conditions[2]] * 2, 4.0, SQUARE, splits=True)
    model.velocity(transformer, x, sigmas, conditions[:2], None, 1.0, SQUARE, splits=True)
    handle.remove()
    assert calls == [4, 2, 2, 2, 2, 2]


def test_guidance_without_negative_conditions_is_an_error(
    model: QwenImage, transformer: nn.Module, conditions: list[Condition]
) -> None:
    with pytest.raises(RuntimeError, match=r"true_cfg_scale=4\.0 needs negative conditions"):
        model.velocity(transformer, draw(1, 16, 16), torch.tensor([0.5]), conditions[:1], None, 4.0, SQUARE)
