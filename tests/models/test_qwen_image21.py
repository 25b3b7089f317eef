# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-2.1: with several images, without one, its forward against diffusers' own, what is transparent, and a
distilled checkpoint's schedule."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Transformer2DModel
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import QwenImage21Pipeline

from tests.models.cases import CPU, PROMPTS, changed, record_inputs
from tests.models.edit_samples import NUM_STEPS, TEXT, request_of, sample, start_of
from verl_digen.inputs.images import PromptInputs
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.tools.checkup.selftest import images_read_at
from verl_digen.types import Geometry

NAME, PIPELINE = "qwen_image21", QwenImage21Pipeline
IMAGES = ((96, 32), (40, 90), (96, 32))
"""A wide one, a tall one, and another wide one of the first one's size."""
IMAGE_PX = 64
WIDE = Geometry(32, 96)
TWO = replace(WIDE, sources=((32, 96), (96, 32)))
"""A wide picture about the first two images."""


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("number", [0, 2])
def test_samples_are_the_pipelines(model, network, encode, pipeline, images, number, scale):
    """Both branches of guidance have the images; the picture has the last one's shape."""
    size = {"height_px": 64, "width_px": 64, "image_px": IMAGE_PX, "size_from_image": True, "negative_prompt": " "}
    request = request_of(model, images[:number], **size)
    request = replace(request, sampling=replace(request.sampling, true_cfg_scale=scale))
    geometry = request.sampling.geometry
    assert geometry == (Geometry(96, 32, 1, TWO.sources) if number else Geometry(64, 64))
    with images_read_at(pipeline, IMAGE_PX):
        made = pipeline(
            TEXT,
            image=[image.read() for image in images[:number]] or None,
            latents=start_of(model, geometry),
            **model.pipeline_size(geometry),
            **{"negative_prompt": " " if scale > 1 else None, "true_cfg_scale": scale},
            num_inference_steps=NUM_STEPS,
            output_type="latent",
        )[0]
    torch.testing.assert_close(sample(model, network, encode, request), made, atol=1e-5, rtol=0)


def test_rows_of_one_text_and_two_images_have_conditions_and_keys_of_their_own(model, network, encode, images):
    size = {"height_px": 32, "width_px": 96, "image_px": IMAGE_PX}
    first, second, without = (request_of(model, each, **size) for each in (images[:1], images[2:], ()))
    assert first.sampling == second.sampling != without.sampling, "one bucket: they may share a forward"
    assert len({one.condition_key for one in (first, second, without)}) == 3
    one, other, bare = encode([first.inputs, second.inputs, without.inputs])
    assert not one["source"].equal(other["source"]) and not one["embeds"].equal(other["embeds"])
    assert one["label1"].equal(other["label1"]), "the text in front of an image does not see it"
    assert one.keys() - bare.keys() == {"source", "label1"}
    x, sigma = torch.randn(1, *model.latent_shape(WIDE)), torch.tensor([0.5])

    def velocity(condition: Any) -> torch.Tensor:
        return model.velocity(network, x, sigma, [condition], None, 1.0, first.sampling.geometry)

    base = velocity(one)
    for part in ("source", "embeds"):
        assert (velocity({**one, part: other[part]}) - base).abs().mean() > 1e-3, part
    with pytest.raises(RuntimeError, match=r"must have 12 tokens of images for Geometry\(.*, got 0; encode"):
        velocity(bare)


def velocity_of(
    model: DiffusionModel, network: Any, encode: Any, texts: Any, images: Any, start: torch.Tensor
) -> torch.Tensor:
    """Return the velocity of rows at different sigmas, about no or two images."""
    conditions = encode([PromptInputs(text, images, IMAGE_PX) for text in texts])
    sigmas = torch.tensor([0.9, 0.2])[: len(start)]
    return model.velocity(network, start, sigmas, conditions, None, 1.0, TWO if images else WIDE)


def start_of_two(model: DiffusionModel) -> torch.Tensor:
    return torch.randn(2, *model.latent_shape(WIDE), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("number", [0, 2])
def test_velocity_and_gradients_are_those_of_the_networks_own_forward(model, encode, images, number, recomputes):
    """Two rows of one prompt."""
    network: Any = model.load_transformer(torch.float32)
    if recomputes:
        network.enable_gradient_checkpointing()
    calls, stop = record_inputs(network)
    found = velocity_of(model, network, encode, PROMPTS[:1] * 2, images[:number], start_of_two(model))
    found.square().sum().backward()
    stop()

    own: Any = QwenImage21Transformer2DModel.from_pretrained(model.path / "transformer")
    (call,) = calls
    texts, shapes = call.pop("encoder_hidden_states"), call.pop("img_shapes")
    # four tokens of an image each; what the text has in their places is not read
    slots = [torch.full((rows * columns // 4,), True) for _, rows, columns in shapes]
    in_texts = [torch.full((text.shape[1],), False) for text in texts]
    is_image = torch.cat([part for pair in zip(in_texts, slots, strict=True) for part in pair]).expand(2, -1)
    text = torch.full((2, is_image.shape[1] - len(slots[-1]), texts[0].shape[2]), 7.0)
    text[~is_image[:, : text.shape[1]]] = torch.cat(texts, dim=1).flatten(0, 1)
    more = {"encoder_hidden_states": text, "img_shapes": [shapes] * 2, "img_mask": is_image, "return_dict": False}
    expected = own(**call, **more)[0][:, -found.shape[1] :]
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(network.get_parameter(name).grad, parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("number", [0, 2])
def test_a_prompts_length_places_its_own_picture_alone(model, network, encode, images, number):
    """Beside a longer prompt, whose length diffusers' network would take for both, and without the padding."""
    start = start_of_two(model)
    together = velocity_of(model, network, encode, PROMPTS, images[:number], start)
    alone = velocity_of(model, network, encode, PROMPTS[:1], images[:number], start[:1])
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-5)


def test_what_is_transparent_becomes_white(model: DiffusionModel, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = model.load_decoder(torch.float32, CPU)
    colours = torch.tensor([-1.0, 0.0, 1.0]).view(1, 3, 1, 1, 1).expand(1, 3, 1, 2, 2)
    opacity = torch.tensor([-3.0, -1.0, 0.0, 1.0]).view(1, 1, 1, 2, 2)
    (vae,) = decoder.modules
    monkeypatch.setattr(vae, "decode", lambda latents, return_dict: [torch.cat([colours, opacity], dim=1)])
    pixels = decoder(torch.zeros(1, 4, 4), Geometry(32, 32)).pixels[0].flatten(0, 1)
    assert pixels.tolist() == [[255, 255, 255], [255, 255, 255], [128, 191, 255], [0, 128, 255]]


def test_a_distilled_checkpoints_sigmas_are_its_own(model: DiffusionModel, tmp_path: Path) -> None:
    """Numbers of its index, without a shift."""
    own = [1.0, 0.9, 0.4]
    copy = changed(model.path, tmp_path / "m", "model_index.json", {"sample_sigmas": own})
    no_shift = {"use_dynamic_shifting": False, "shift_terminal": None}
    distilled = load_model(changed(copy, tmp_path / "n", "scheduler/scheduler_config.json", no_shift))
    assert distilled.sigmas(3, WIDE).tolist() == pytest.approx([*own, 0.0])
    with pytest.raises(
        ValueError, match=r"num_steps and val_num_steps must be 3 for this Qwen-Image-2\.1 .* got 8; set"
    ):
        distilled.sigmas(8, WIDE)


def test_a_network_whose_prompts_follow_the_pictures_sigma_is_refused(model: DiffusionModel, tmp_path: Path) -> None:
    copy = changed(model.path, tmp_path / "m", "transformer/config.json", {"causal_condition": False})
    with pytest.raises(ValueError, match=r"a transformer with causal_condition=true for Qwen-Image-2\.1, got false in"):
        load_model(copy)
