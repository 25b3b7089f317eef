# SPDX-License-Identifier: Apache-2.0
"""The Qwen-Image model file against diffusers' own pipeline, part by part (the loop: tests/rollout)."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from torch import Tensor, nn

from tests.texts import of_texts
from verl_digen.models import MODELS, load_model
from verl_digen.models.qwen_image import QwenImage, conv_one_frame
from verl_digen.types import Condition, Geometry

CPU = torch.device("cpu")
SQUARE = Geometry(height_px=64, width_px=64)
WIDE = Geometry(height_px=48, width_px=80)
SHORT = "a red circle"
LONG = "two small blue squares left of a red circle on a green background, by Ünal 3"
NUM_STEPS = 6


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


def close(actual: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


# -- loading ----------------------------------------------------------------------------------------------


def test_the_model_is_found_by_its_pipeline_and_reads_no_weights(tiny_qwen_image: Path, tmp_path: Path) -> None:
    configs = shutil.copytree(tiny_qwen_image, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    assert load_model(configs).latent_shape(SQUARE) == (16, 16)


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
        ("transformer/config.json", {"guidance_embeds": True}, "guidance_embeds=false, got true"),
    ],
)
def test_a_checkpoint_for_another_task_is_an_error(
    tiny_qwen_image: Path, tmp_path: Path, file: str, change: dict, message: str
) -> None:
    copy = shutil.copytree(tiny_qwen_image, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_model(copy)


def test_weights_come_in_the_dtype_asked_for(model: QwenImage) -> None:
    assert {parameter.dtype for parameter in model.load_transformer(torch.bfloat16).parameters()} == {torch.bfloat16}
    meta = model.load_transformer(torch.bfloat16, meta=True)
    assert {parameter.dtype for parameter in meta.parameters()} == {torch.bfloat16}


# -- text -------------------------------------------------------------------------------------------------


def test_an_embedding_is_the_pipelines_and_does_not_depend_on_other_prompts(
    model: QwenImage, pipeline: QwenImagePipeline, conditions: list[Condition]
) -> None:
    with torch.no_grad():
        embeds, mask = pipeline.encode_prompt([SHORT, LONG, " "], max_sequence_length=1024)
    assert mask is not None
    lengths = mask.sum(1).tolist()
    assert len(set(lengths)) == 3
    for condition, padded, length in zip(conditions, embeds, lengths, strict=True):
        assert condition["embeds"].shape == (length, 32)
        close(condition["embeds"], padded[:length])
    encode = of_texts(model.load_encoder(torch.float32, CPU))
    close(encode([LONG])[0]["embeds"], conditions[1]["embeds"], 0)
    assert not encode([LONG])[0]["embeds"].requires_grad
    assert not encode([LONG])[0]["embeds"].is_inference()


def test_prompts_of_one_length_have_no_mask(model: QwenImage, conditions: list[Condition]) -> None:
    assert set(model.collate([conditions[0], conditions[0]])) == {"embeds"}
    mixed = model.collate(conditions[:2])
    assert mixed["mask"].sum(1).tolist() == [len(condition["embeds"]) for condition in conditions[:2]]


# -- the shape of the problem -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (
            Geometry(72, 64),
            r"digen\.sampling\.height_px must be a multiple of 16 .* got 72; the nearest is 64",
        ),
        (
            Geometry(64, 90),
            r"digen\.sampling\.width_px must be a multiple of 16 .* got 90; the nearest is 96",
        ),
        (Geometry(64, 3), r"digen\.sampling\.width_px .* got 3; the nearest is 16"),
        (Geometry(64, 64, 5), r"digen\.sampling\.num_frames must be 1 for Qwen-Image.* got 5"),
    ],
)
def test_an_impossible_size_is_an_error_that_names_the_key(model: QwenImage, geometry: Geometry, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.latent_shape(geometry)


def test_latents_are_packed_tokens(model: QwenImage) -> None:
    assert model.latent_shape(WIDE) == (3 * 5, 16)


@pytest.mark.parametrize("geometry", [SQUARE, WIDE, Geometry(256, 512)])
@pytest.mark.parametrize("num_steps", [2, 10])
def test_the_schedule_is_the_pipelines(
    model: QwenImage, pipeline: QwenImagePipeline, geometry: Geometry, num_steps: int
) -> None:
    sigmas = model.sigmas(num_steps, geometry)
    pipeline(
        prompt_embeds=draw(1, 5, 32),
        true_cfg_scale=1.0,
        height=geometry.height_px,
        width=geometry.width_px,
        num_inference_steps=num_steps,
        output_type="latent",
    )
    close(sigmas, pipeline.scheduler.sigmas, 0)
    assert sigmas.dtype == torch.float32
    assert sigmas.shape == (num_steps + 1,)
    assert sigmas[0] == 1.0
    assert sigmas[-1] == 0.0
    assert (sigmas.diff() < 0).all()


def test_pictures_are_the_pipelines_rounded_to_8_bits(model: QwenImage, pipeline: Any) -> None:
    latents = draw(3, *model.latent_shape(WIDE))
    pixels = model.load_decoder(torch.float32, CPU)(latents, WIDE)
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, 48, 80, 3)
    assert pixels.float().std() > 20  # not a blank picture
    # The callback puts the latents back after the last step, so the pipeline only decodes.
    pictures = pipeline(
        prompt_embeds=draw(3, 5, 32),
        true_cfg_scale=1.0,
        latents=latents,
        height=48,
        width=80,
        num_inference_steps=2,
        output_type="pil",
        callback_on_step_end=lambda pipe, step, timestep, tensors: {"latents": latents},
    ).images
    for ours, theirs in zip(pixels, pictures, strict=True):
        expected = torch.frombuffer(bytearray(theirs.tobytes()), dtype=torch.uint8).view(48, 80, 3)
        # The 2D convolutions sum in another order than the 3D ones: a value at the edge of rounding may change.
        gap = (ours.int() - expected.int()).abs()
        assert gap.max() <= 1 and gap.count_nonzero() <= 3, f"{gap.count_nonzero()} of {gap.numel()} values differ"


def test_the_decoder_computes_what_the_vae_does(model: QwenImage, pipeline: QwenImagePipeline) -> None:
    """The convolutions of one frame as 2D ones, against diffusers' own in 3D."""
    latents = draw(2, pipeline.vae.config.z_dim, 1, 6, 10)
    expected = pipeline.vae.decode(latents, return_dict=False)[0]
    for module in (flat := copy.deepcopy(pipeline.vae)).modules():
        if isinstance(module, QwenImageCausalConv3d):
            module.forward = functools.partial(conv_one_frame, module)
    torch.testing.assert_close(flat.decode(latents, return_dict=False)[0], expected, atol=1e-5, rtol=0)


# -- the network ------------------------------------------------------------------------------------------


def test_the_tiny_network_notices_what_it_is_given(
    model: QwenImage, transformer: nn.Module, conditions: list[Condition]
) -> None:
    """The comparisons below must be able to fail."""
    x = draw(2, 16, 16)

    def velocity(sigma: float, condition: Condition, latents: Tensor) -> Tensor:
        return model.velocity(transformer, latents, torch.full((2,), sigma), [condition] * 2, None, 1.0, SQUARE)

    base = velocity(0.5, conditions[0], x)
    assert (velocity(0.4, conditions[0], x) - base).abs().mean() > 0.05
    assert (velocity(0.5, conditions[1], x) - base).abs().mean() > 0.05
    assert (velocity(0.5, conditions[0], x.flip(1)).flip(1) - base).abs().mean() > 0.05


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("geometry", [SQUARE, WIDE])
def test_rows_at_different_sigmas_and_prompts_equal_one_at_a_time(
    model: QwenImage, transformer: nn.Module, conditions: list[Condition], geometry: Geometry, scale: float
) -> None:
    short, long, negative = conditions
    x = draw(4, *model.latent_shape(geometry))
    sigmas = torch.tensor([1.0, 0.7, 0.02, 0.7])
    positives = [short, long, long, short]
    negatives = [negative, negative, short, negative] if scale > 1 else None
    together = model.velocity(transformer, x, sigmas, positives, negatives, scale, geometry)
    alone = [
        model.velocity(
            transformer,
            x[n : n + 1],
            sigmas[n : n + 1],
            positives[n : n + 1],
            negatives and negatives[n : n + 1],
            scale,
            geometry,
        )
        for n in range(4)
    ]
    close(together, torch.cat(alone))


def test_padding_changes_nothing(model: QwenImage, transformer: nn.Module, conditions: list[Condition]) -> None:
    """Neither its length nor its content matters."""
    x, sigmas = draw(1, 16, 16), torch.tensor([0.6])
    plain = model.predict(transformer, x, sigmas, model.collate(conditions[:1]), SQUARE)
    length = len(conditions[0]["embeds"])
    filler = torch.cat([conditions[0]["embeds"], 10 * draw(40, 32)])
    mask = torch.arange(length + 40)[None] < length
    close(model.predict(transformer, x, sigmas, {"embeds": filler[None], "mask": mask}, SQUARE), plain)


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


def test_timesteps_are_rounded_to_the_networks_dtype_as_in_the_pipeline(
    model: QwenImage, conditions: list[Condition]
) -> None:
    """Both with bf16 parameters and with a wrapper over fp32 shards that computes in bf16."""
    seen: list[Tensor] = []

    class Recorder(nn.Linear):
        def forward(self, hidden_states: Tensor, timestep: Tensor, **inputs: object) -> tuple[Tensor]:
            assert hidden_states.dtype == inputs["encoder_hidden_states"].dtype == torch.bfloat16  # pyright: ignore
            seen.append(timestep)
            return (hidden_states,)

    x, sigmas = draw(2, 16, 16), torch.tensor([0.9732, 0.1234])
    condition = model.collate(conditions[:2])
    model.predict(Recorder(1, 1, dtype=torch.bfloat16), x, sigmas, condition, SQUARE)
    mixed = QwenImage(model.path)
    mixed.compute_dtype = torch.bfloat16
    mixed.predict(Recorder(1, 1), x, sigmas, condition, SQUARE)
    expected = (1000 * sigmas).to(torch.bfloat16) / 1000
    for timestep in seen:
        assert timestep.dtype == torch.bfloat16
        close(timestep, expected, 0)


def test_lora_wraps_every_target_and_starts_as_the_base(
    model: QwenImage, transformer: nn.Module, conditions: list[Condition]
) -> None:
    x, sigmas = draw(2, 16, 16), torch.tensor([0.6, 0.3])
    base = model.velocity(transformer, x, sigmas, conditions[:2], None, 1.0, SQUARE)
    config = peft.LoraConfig(r=2, target_modules=list(model.spec.lora_targets))
    adapted = peft.get_peft_model(model.load_transformer(torch.float32), config)  # pyright: ignore
    wrapped = {name for name, module in adapted.named_modules() if hasattr(module, "lora_A")}
    for target in model.spec.lora_targets:
        assert sum(name.endswith(target) for name in wrapped) == 2, target  # one per block
    assert len(wrapped) == 2 * len(model.spec.lora_targets)
    velocity = model.velocity(adapted, x, sigmas, conditions[:2], None, 1.0, SQUARE)
    close(velocity, base)
    velocity.sum().backward()
    unused = {name for name, p in adapted.named_parameters() if p.requires_grad and p.grad is None}
    # The last block's text output is not read; everything else learns.
    assert all(".1." in name and any(part in name for part in ("txt_mlp", "to_add_out", "add_q")) for name in unused)
