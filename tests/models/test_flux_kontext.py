# SPDX-License-Identifier: Apache-2.0
"""FLUX.1 Kontext: with an image of another shape than the picture's, without one, and what its conditions depend on."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext

from tests.models.edit_samples import NUM_STEPS, TEXT, assert_conditions_of_their_own, request_of, sample, start_of
from verl_digen.inputs.images import PromptInputs
from verl_digen.types import Geometry

NAME, PIPELINE = "flux_kontext", pipeline_flux_kontext.FluxKontextPipeline
IMAGES = ((130, 60),) * 2


def run_pipeline(model: Any, pipeline: Any, geometry: Geometry, image: Any, **more: Any) -> torch.Tensor:
    start = start_of(model, geometry)
    given = {"num_inference_steps": NUM_STEPS, "output_type": "latent", **more}
    return pipeline(image, TEXT, latents=start, **model.pipeline_size(geometry), **given)[0]


@pytest.mark.parametrize("guided", [{}, {"true_cfg_scale": 3.0, "negative_prompt": " "}], ids=["plain", "guided"])
def test_a_picture_of_the_images_shape_is_the_pipelines(model, network, encode, pipeline, images, guided):
    """Both guidances: the scale that the network reads, and the second branch, which has the image too."""
    asked = {"height_px": 80, "width_px": 80, "size_from_image": True, "image_px": 64, "guidance_scale": 2.5}
    request = request_of(model, images[:1], **asked)
    request = replace(request, sampling=replace(request.sampling, true_cfg_scale=guided.get("true_cfg_scale", 1.0)))
    geometry = request.sampling.geometry
    assert geometry == Geometry(48, 112, 1, ((48, 96),)), "130 x 60 px"
    with patch.object(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [(96, 48)]):
        made = run_pipeline(model, pipeline, geometry, images[0].read(), guidance_scale=2.5, **guided)
    torch.testing.assert_close(sample(model, network, encode, request), made, atol=1e-5, rtol=0)


def test_without_an_image_it_is_the_pipelines_text_to_image(model, network, encode, pipeline):
    request = request_of(model, (), height_px=64, width_px=96, size_from_image=True)
    geometry = request.sampling.geometry
    assert geometry == Geometry(64, 96)
    made = run_pipeline(model, pipeline, geometry, None)
    torch.testing.assert_close(sample(model, network, encode, request), made, atol=1e-5, rtol=0)


def test_rows_of_one_text_and_two_images_have_conditions_and_keys_of_their_own(model, network, encode, images):
    asked = [request_of(model, each, height_px=64, width_px=64, image_px=64) for each in (images[:1], images[1:], ())]
    assert_conditions_of_their_own(model, network, encode, asked, num_tokens=18)


def test_several_images_are_an_error(encode, images):
    with pytest.raises(ValueError, match=r"a prompt must have at most 1 image for FLUX\.1 Kontext, got 2; leave some"):
        encode([PromptInputs(TEXT, images, 64)])
