# SPDX-License-Identifier: Apache-2.0
"""Pictures as parts of a message: pixels, order, size limit."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from tests.reward.contract import make_picture
from verl_digen.reward.judges.content import fitted, picture_part, sample_images
from verl_digen.types import PromptRow, RewardInput


def picture_of(part) -> Image.Image:
    kind, data = part["image_url"]["url"].split(";base64,")
    assert part["type"] == "image_url" and kind == "data:image/png"
    return Image.open(io.BytesIO(base64.b64decode(data, validate=True)))


def test_a_part_holds_every_pixel():
    pixels = make_picture(48, 96, seed=3)
    assert np.array_equal(np.asarray(picture_of(picture_part(Image.fromarray(pixels)))), pixels)


@pytest.mark.parametrize(
    "size, fits", [((64, 32), (64, 32)), ((65, 65), (64, 64)), ((2000, 500), (64, 16)), ((10, 5000), (1, 64))]
)
def test_a_picture_is_made_smaller_and_never_larger(size, fits):
    assert fitted(Image.new("RGB", size), 64).size == fits


def test_frames_of_samples_come_one_sample_after_the_other():
    row = PromptRow("a", "test", None)
    videos = [
        RewardInput(np.full((5, 8, 8, 3), 0, np.uint8), row, 0),
        RewardInput(np.zeros((5, 8, 8, 3), np.uint8), row, 1),
    ]
    for number, video in enumerate(videos):
        video.pixels[...] = np.arange(5)[:, None, None, None] + 100 * number
    values = [np.asarray(image)[0, 0, 0] for image in sample_images(videos, 3, 64)]
    assert values == [0, 2, 4, 100, 102, 104]
