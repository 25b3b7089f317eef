# SPDX-License-Identifier: Apache-2.0
"""Sizes from images, against the pipelines and examples whose rules they are."""

from __future__ import annotations

import numpy as np
import pytest
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

from verl_digen.config.sampling import SamplingConfig
from verl_digen.image_sizes import IMAGE_SIZES
from verl_digen.sampling.requests import geometry_of
from verl_digen.types import Geometry

IMAGES = [(1000, 1000), (4000, 3000), (832, 480), (480, 832), (1280, 704), (333, 1024), (90, 40), (1, 40), (40, 1)]


@pytest.mark.parametrize("size", IMAGES, ids=str)
@pytest.mark.parametrize("max_area", [480 * 832, 704 * 1280])
@pytest.mark.parametrize(("rule", "mod_value"), [("wan", 16), ("wan_ti2v", 32)])
def test_a_size_is_that_of_the_example_of_wans_pipeline(size, max_area, rule, mod_value):
    width, height = size
    aspect_ratio = height / width
    expected = tuple(
        round(np.sqrt(max_area * part)) // mod_value * mod_value for part in (aspect_ratio, 1 / aspect_ratio)
    )
    found = IMAGE_SIZES[rule].picture(width, height, max_area)
    assert found == tuple(max(side, mod_value) for side in expected) and found[0] * found[1] <= max_area * 1.01


@pytest.mark.parametrize("target", [640, 960, 64])
@pytest.mark.parametrize("size", IMAGES, ids=str)
def test_a_size_is_that_of_hunyuan_video_15s_pipeline(size, target):
    processor = HunyuanVideo15ImageProcessor(vae_scale_factor=16)
    expected = processor.calculate_default_height_width(height=size[1], width=size[0], target_size=target)
    assert IMAGE_SIZES["hunyuan_video15"].picture(*size, target**2) == tuple(expected)


def test_a_continued_image_is_read_at_the_size_of_the_video():
    config = SamplingConfig(
        height_px=480, width_px=832, num_frames=81, size_from_image=True, image_sizes="wan", image_px=1024
    )
    assert geometry_of(config, [(900, 900)]) == Geometry(624, 624, 81, ((624, 624),))
    assert geometry_of(config, []) == Geometry(480, 832, 81)


def test_an_unknown_rule_is_an_error():
    with pytest.raises(
        ValueError, match=r"digen\.sampling\.image_sizes must be one of qwen_image_edit, .*, wan, .*'wan2'"
    ):
        SamplingConfig(image_sizes="wan2")
