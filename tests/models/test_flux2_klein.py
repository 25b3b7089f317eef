# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 [klein]: with several images, without one, and what its conditions depend on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline

from tests.models.cases import CPU, draw_image
from tests.models.edit_samples import NUM_STEPS, TEXT, assert_conditions_of_their_own, request_of, sample, start_of
from verl_digen.inputs.images import PromptInputs
from verl_digen.tools.checkup.selftest import final_latents
from verl_digen.types import Geometry

NAME, PIPELINE = "flux2_klein", Flux2KleinPipeline
IMAGES = ((100, 70), (64, 90), (100, 70))
"""A wide one, a tall one, and another wide one of the first one's size."""


def run_pipeline(model: Any, pipeline: Any, geometry: Geometry, images: Any, **more: Any) -> torch.Tensor:
    given = {"num_inference_steps": NUM_STEPS, "output_type": "latent", "guidance_scale": 1.0, **more}
    start = start_of(model, geometry)
    return final_latents(pipeline, image=images, prompt=TEXT, latents=start, **model.pipeline_size(geometry), **given)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_two_images_of_different_shapes_are_the_pipelines(model, network, encode, pipeline, images, scale):
    """Guided with the pipeline's own negative prompt, which is empty; both branches have the images."""
    request = request_of(model, images[:2], height_px=80, width_px=80, size_from_image=True, negative_prompt="")
    request = replace(request, sampling=replace(request.sampling, true_cfg_scale=scale))
    geometry = request.sampling.geometry
    assert geometry == Geometry(64, 80, 1, ((64, 96), (80, 64))), "the first image's shape is 100 to 70"
    made = run_pipeline(model, pipeline, geometry, [image.read() for image in images[:2]], guidance_scale=scale)
    torch.testing.assert_close(sample(model, network, encode, request), made, atol=1e-5, rtol=0)


def test_without_an_image_it_is_the_pipelines_text_to_image(model, network, encode, pipeline):
    request = request_of(model, (), height_px=64, width_px=96, size_from_image=True)
    geometry = request.sampling.geometry
    assert geometry == Geometry(64, 96)
    made = run_pipeline(model, pipeline, geometry, None)
    torch.testing.assert_close(sample(model, network, encode, request), made, atol=1e-5, rtol=0)


@pytest.mark.parametrize("image_px", [1024, 64])
def test_images_are_encoded_as_in_the_pipeline(model, encode, pipeline, images, image_px):
    """At their own size, cropped, and made smaller first above `image_px` squared pixels."""
    (condition,) = encode([PromptInputs(TEXT, images[:2], image_px)])
    processor = pipeline.image_processor
    read = [processor._resize_if_exceeds_area(image.read(), image_px**2) for image in images[:2]]
    whole = [{"height": image.height // 16 * 16, "width": image.width // 16 * 16} for image in read]
    pixels = [processor.preprocess(one, **size, resize_mode="crop") for one, size in zip(read, whole, strict=True)]
    source, _ = pipeline.prepare_image_latents(pixels, 1, None, CPU, torch.float32)
    torch.testing.assert_close(condition["source"], source[0], atol=1e-5, rtol=0)
    embeds, _ = pipeline.encode_prompt(TEXT)
    torch.testing.assert_close(condition["embeds"], embeds[0], atol=1e-5, rtol=0)


def test_rows_of_one_text_and_two_images_have_conditions_and_keys_of_their_own(model, network, encode, images):
    asked = [request_of(model, each, height_px=64, width_px=64) for each in (images[:1], images[2:], ())]
    assert_conditions_of_their_own(model, network, encode, asked, num_tokens=24)


def test_images_that_the_pipeline_refuses_are_errors(encode, images, tmp_path: Path):
    with pytest.raises(ValueError, match=r"must have at most 4 images for FLUX\.2 \[klein\], got 5; leave some out"):
        encode([PromptInputs(TEXT, images[:1] * 5, 64)])
    for size, message in (((63, 80), "Image too small"), ((64, 600), "Aspect ratio too extreme")):
        told = rf"that the pipeline of FLUX\.2 .* takes, got .*{size[1]}\.png' \(ValueError: {message}.*; replace it"
        with pytest.raises(ValueError, match=told):
            encode([PromptInputs(TEXT, (draw_image(tmp_path / f"{size[1]}.png", size),), 64)])
