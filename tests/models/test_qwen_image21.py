# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-2.1: with several images, without one, its forward against diffusers' own, what is transparent, and a
distilled checkpoint's schedule."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Transformer2DModel
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import QwenImage21Pipeline
from torch import Tensor

from tests.models.cases import CPU, PROMPTS, changed, record_inputs
from tests.models.edit_samples import NUM_STEPS, TEXT, request_of, sample, start_of
from verl_digen.inputs.images import PromptInputs
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.tools.checkup.selftest import images_read_at
from verl_digen.types import Condition, Geometry

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


def conditions_of(encode: Any, texts: Sequence[str], images: Any) -> list[Condition]:
    return encode([PromptInputs(text, images, IMAGE_PX) for text in texts])


def start_of_three(model: DiffusionModel) -> Tensor:
    return torch.randn(3, *model.latent_shape(WIDE), generator=torch.Generator().manual_seed(0))


SIGMAS = torch.tensor([0.9, 0.2, 0.5])


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("number", [0, 2])
def test_velocity_and_gradients_are_those_of_the_networks_own_forward(model, encode, images, number, recomputes):
    """Three rows, of which two share a prompt: its tokens run once, diffusers' for each row."""
    (one,) = conditions_of(encode, PROMPTS[:1], images[:number])
    other = {name: part.flip(0) for name, part in one.items()}  # of one length, because diffusers' masks all rows alike
    rows, start, geometry = [one, other, one], start_of_three(model), TWO if number else WIDE
    network: Any = model.load_transformer(torch.float32)
    if recomputes:
        network.enable_gradient_checkpointing()
    calls, stop = record_inputs(network)
    found = model.velocity(network, start, SIGMAS, rows, None, 1.0, geometry)
    found.square().sum().backward()
    stop()
    assert [len(text) for text in calls[0]["encoder_hidden_states"]] == [2] * (number + 1), "prompts, not rows"

    own: Any = QwenImage21Transformer2DModel.from_pretrained(model.path / "transformer")
    shapes = [(1, height // 16, width // 16) for height, width in (*geometry.sources, (32, 96))]
    # four tokens of an image each; what the text has in their places is not read
    labels = [f"label{place}" for place in range(1, number + 1)]
    lengths = zip([*labels, "embeds"], shapes, strict=True)
    is_image = torch.tensor(
        [kind for name, (_, *sides) in lengths for kind in [0] * len(one[name]) + [1] * (math.prod(sides) // 4)]
    )
    num_text = len(is_image) - shapes[-1][1] * shapes[-1][2] // 4
    texts = torch.full((3, num_text, one["embeds"].shape[1]), 7.0)
    texts[:, is_image[:num_text] == 0] = torch.stack(
        [torch.cat([row[name] for name in [*labels, "embeds"]]) for row in rows]
    )
    read = torch.cat([torch.stack([row["source"] for row in rows]), start], dim=1) if number else start
    expected = own(
        hidden_states=read,
        timestep=SIGMAS,
        encoder_hidden_states=texts,
        img_shapes=[shapes] * 3,
        img_mask=is_image.bool().expand(3, -1),
        return_dict=False,
    )[0][:, -start.shape[1] :]
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(network.get_parameter(name).grad, parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("number", [0, 2])
def test_a_row_is_the_same_beside_others_of_its_prompt_and_of_a_longer_one(model, network, encode, images, number):
    """diffusers' network would place its picture behind the longest prompt."""
    start, geometry = start_of_three(model), TWO if number else WIDE
    short, long = conditions_of(encode, PROMPTS, images[:number])
    assert len(short["embeds"]) < len(long["embeds"])
    together = model.velocity(network, start, SIGMAS, [short, long, short], None, 1.0, geometry)
    for row, condition in enumerate((short, long, short)):
        alone = model.velocity(network, start[row : row + 1], SIGMAS[row : row + 1], [condition], None, 1.0, geometry)
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-5, rtol=1e-5)


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
