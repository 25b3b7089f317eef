# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-Edit-Plus: images of several shapes, sizes from images, and what its conditions depend on."""

import json
import shutil
from typing import Any

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

from tests.models.cases import CPU, draw_image
from tests.models.edit_samples import NUM_STEPS, TEXT, request_of, sample, start_of
from tests.tiny_models import build_tiny
from verl_digen.inputs.images import PromptInputs
from verl_digen.inputs.sizes import fitted_size
from verl_digen.models import load_model
from verl_digen.tools.checkup.selftest import images_read_at
from verl_digen.types import Geometry

NAME, PIPELINE = "qwen_image_edit_plus", pipeline_qwenimage_edit_plus.QwenImageEditPlusPipeline
IMAGES = ((90, 40), (50, 70), (90, 40))
"""A wide one, a tall one, and another wide one of the first one's size."""


def test_two_images_of_different_shapes_are_the_pipelines(model, network, encode, pipeline, images):
    request = request_of(model, images[:2], height_px=64, width_px=64, size_from_image=True, image_px=96)
    geometry = request.sampling.geometry
    assert geometry == Geometry(64, 64, 1, ((64, 128), (128, 96))), "the last image's shape is 50 to 70"
    with images_read_at(pipeline, 96):
        made = pipeline(
            [image.read() for image in images[:2]],
            TEXT,
            latents=start_of(model, geometry),
            height=geometry.height_px,
            width=geometry.width_px,
            num_inference_steps=NUM_STEPS,
            output_type="latent",
        )[0]
    torch.testing.assert_close(sample(model, network, encode, request), made, atol=1e-5, rtol=0)


@pytest.mark.parametrize("area", [384**2, 1024**2])
@pytest.mark.parametrize("size", [(1000, 1000), (4000, 3000), (1, 2), (333, 1024), (90, 40)])
def test_a_fitted_size_is_the_pipelines(size, area):
    width, height = pipeline_qwenimage_edit_plus.calculate_dimensions(area, size[0] / size[1])
    assert fitted_size(size[0], size[1], area) == (height, width)


def test_rows_of_one_text_and_two_images_have_conditions_and_keys_of_their_own(model, network, encode, images):
    asked = {"height_px": 64, "width_px": 64, "image_px": 64}
    first, second = (request_of(model, (image,), **asked) for image in (images[0], images[2]))
    assert first.sampling == second.sampling, "one bucket: they may share a forward"
    assert first.condition_key != second.condition_key
    one, other = encode([first.inputs, second.inputs])
    assert not one["embeds"].equal(other["embeds"]) and not one["source"].equal(other["source"])
    x, sigma = torch.randn(1, *model.latent_shape(first.sampling.geometry)), torch.tensor([0.5])

    def velocity(condition: Any) -> torch.Tensor:
        return model.velocity(network, x, sigma, [condition], None, 1.0, first.sampling.geometry)

    base = velocity(one)
    assert (velocity({**one, "source": other["source"]}) - base).abs().mean() > 1e-3, "the network reads the image"
    assert (velocity({**one, "embeds": other["embeds"]}) - base).abs().mean() > 1e-3, "and so does the language model"
    larger = request_of(model, images[:1], **asked | {"image_px": 96})
    assert larger.condition_key != first.condition_key and larger.sampling != first.sampling


def test_an_image_at_another_size_than_the_requests_is_an_error(model, network, encode, images):
    (condition,) = encode([PromptInputs(TEXT, images[:1], 64)])
    geometry = Geometry(64, 64, 1, ((64, 64),))
    with pytest.raises(RuntimeError, match=r"must have 16 tokens of images for Geometry\(.*, got 12; encode"):
        model.velocity(network, torch.randn(1, 16, 16), torch.tensor([0.5]), [condition], None, 1.0, geometry)


def test_a_prompt_that_is_too_long_is_an_error_with_its_image(encode, images):
    with pytest.raises(ValueError, match="must have at most 1088 tokens in its template for Qwen-Image-Edit-Plus"):
        encode([PromptInputs("red " * 1100, images[:1], 64)])


def test_an_images_tokens_are_counted_within_the_bounds_of_its_processor(model, tmp_path):
    """The processor of examples/tiny_edit makes every image smaller."""
    copy = shutil.copytree(model.path, tmp_path / "c")
    file = copy / "processor" / "preprocessor_config.json"
    sizes = {"size": {"shortest_edge": 3136, "longest_edge": 4096}}
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    small = load_model(copy)
    square = draw_image(tmp_path / "square.png", (64, 64))
    prompts = [PromptInputs(TEXT, (square,) * number, 64) for number in (1, 2)]
    one, two = small.load_encoder(torch.float32, CPU)(prompts)
    geometry = Geometry(64, 64, 1, ((64, 64),))
    added = len(two["embeds"]) - len(one["embeds"])
    assert small.num_image_text_tokens(geometry) == added < 20 < model.num_image_text_tokens(geometry)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The first Qwen-Image-Edit, whose prompts have one image."""
    return load_model(build_tiny("qwen_image_edit", tmp_path_factory.mktemp("first") / "c"))


def test_the_first_model_reads_an_image_at_one_size_and_counts_its_tokens(first, images):
    """Its successor's language model reads every image at 384 x 384 px."""
    encode = first.load_encoder(torch.float32, CPU)
    lengths, expected = [], []
    for side_px in (64, 256):
        (condition,) = encode([PromptInputs(TEXT, images[1:2], side_px)])
        source = fitted_size(images[1].width_px, images[1].height_px, side_px**2)
        geometry = Geometry(64, 64, 1, (source,))
        assert len(condition["source"]) == first.num_source_tokens(geometry)
        lengths.append(len(condition["embeds"]))
        expected.append(first.num_image_text_tokens(geometry))
    assert lengths[1] - lengths[0] == expected[1] - expected[0] > 50
    bounded = Geometry(64, 64, 1, ((4096, 4096),))
    assert first.num_image_text_tokens(bounded) < 1290, "the processor of the tiny checkpoint reads 1280 tokens at most"
