# SPDX-License-Identifier: Apache-2.0
"""Sizes of a prompt's images as a network reads them, and of a picture or video that has an image's shape: a rule for
each family of pipelines, which `digen.sampling.image_sizes` names. A rule is a function of sizes alone, so that
requests are made without the model.

Invariant (tests/models/test_image_sizes.py): with the areas of a pipeline, sizes are the pipeline's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

SIDE_MULTIPLE = 32
"""Sides of a fitted image are multiples of this: `calculate_dimensions` of diffusers' Qwen-Image-Edit pipelines."""
TOKEN_PX = 16
"""Pixels of a side of a token of FLUX.1 and FLUX.2."""
KONTEXT_AREA = 1024 * 1024
"""Area in px, about, of the sizes below."""
KONTEXT_SIZES = (
    *((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104)),
    (1024, 1024),
    *((1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688), (1568, 672)),
)
"""(width, height) at which FLUX.1 Kontext was trained: PREFERRED_KONTEXT_RESOLUTIONS of diffusers' pipeline."""
FLOOR_MULTIPLE, TI2V_MULTIPLE = 16, 32
"""Sides of a Wan video are multiples of this: 8 px of its VAE, or 16 px of TI2V-5B's, and 2 positions of a token."""
BUCKET_PX, MAX_BUCKET_RATIO = 16, 4.0
"""Step of HunyuanVideo 1.5's sizes, and the largest ratio of their sides: `generate_crop_size_list` of its pipeline."""


Rule = Callable[[int, int, int], tuple[int, int]]
"""Width and height of an image in px, and an area in px -> (height, width)."""


def check_flux2_image(width_px: int, height_px: int, reference: str) -> None:
    """Raise ValueError for an image that FLUX.2's pipelines refuse.

    Source: `Flux2ImageProcessor.check_image_input` of diffusers.
    """
    got = f"got {width_px} x {height_px} px in {reference!r}"
    if min(width_px, height_px) < 64:
        raise ValueError(
            f"an image of a prompt must have sides of 64 px or more, {got}; enlarge it, or remove its prompt"
        )
    if max(width_px, height_px) > 8 * min(width_px, height_px):
        raise ValueError(
            f"an image of a prompt must have a long side of at most 8 times the short one, {got}; crop it, or remove "
            "its prompt"
        )


@dataclass(frozen=True)
class ImageSizes:
    """Sizes by one family of pipelines."""

    read: Rule | None
    """Size at which the network reads an image; the area is `digen.sampling.image_px` squared. None: the size of the
    video."""
    picture: Rule
    """Size of a picture or video of an image's shape; the area is height_px x width_px of `digen.sampling`."""
    shaped_by: int
    """Position of the image whose shape the picture has, in a prompt's list: 0 the first, -1 the last."""
    check: Callable[[int, int, str], None] | None = None
    """Refuses an image, by width, height and reference, with a ValueError; None: the pipelines take all."""


def fitted_size(width_px: int, height_px: int, area_px: int) -> tuple[int, int]:
    """(height, width) of about `area_px` pixels with the shape of a picture; multiples of `SIDE_MULTIPLE`.

    Source: `calculate_dimensions` of diffusers' Qwen-Image-Edit pipelines, which has no least side.
    """
    width = math.sqrt(area_px * (width_px / height_px))
    height = width / (width_px / height_px)
    sides = (max(1, round(side / SIDE_MULTIPLE)) * SIDE_MULTIPLE for side in (height, width))
    return next(sides), next(sides)


def preferred_size(width_px: int, height_px: int, area_px: int) -> tuple[int, int]:
    """(height, width) of the entry of `KONTEXT_SIZES` nearest in shape, scaled from `KONTEXT_AREA` to `area_px`.

    Source: "3. Preprocess image" of diffusers' `FluxKontextPipeline`, which does not scale.
    """
    shape = _whole(width_px) / _whole(height_px)
    _, width, height = min((abs(shape - width / height), width, height) for width, height in KONTEXT_SIZES)
    scale = math.sqrt(area_px / KONTEXT_AREA)
    sides = (max(1, round(side * scale / TOKEN_PX)) * TOKEN_PX for side in (height, width))
    return next(sides), next(sides)


def shaped_size(width_px: int, height_px: int, area_px: int) -> tuple[int, int]:
    """(height, width) of at most about `area_px` pixels with the shape of a picture; multiples of `TOKEN_PX`.

    Source: the start of `FluxKontextPipeline.__call__`, given the image's height and width, and `area_px` as max_area.
    """
    shape = width_px / height_px
    width, height = round((area_px * shape) ** 0.5), round((area_px / shape) ** 0.5)
    return _whole(height), _whole(width)


def limited_size(width_px: int, height_px: int, area_px: int) -> tuple[int, int]:
    """(height, width) of an image that is made smaller if it has more than `area_px` pixels, never larger; multiples of
    `TOKEN_PX`, to which it is cropped.

    Source: "4. process images" of diffusers' `Flux2KleinPipeline`, whose area is 1024 x 1024.
    """
    scale = min(1.0, math.sqrt(area_px / (width_px * height_px)))
    return _whole(int(height_px * scale)), _whole(int(width_px * scale))


def _whole(side_px: int) -> int:
    """The side without what is left of a token, at least one."""
    return max(1, side_px // TOKEN_PX) * TOKEN_PX


def floored_size(width_px: int, height_px: int, area_px: int, multiple: int = FLOOR_MULTIPLE) -> tuple[int, int]:
    """(height, width) of at most `area_px` pixels with the shape of an image; multiples of `multiple`.

    Source: the example of diffusers' WanImageToVideoPipeline, with `max_area` = area_px; it has no least side.
    """
    ratio = height_px / width_px
    sides = (round(math.sqrt(area_px * part)) // multiple for part in (ratio, 1 / ratio))
    return max(1, next(sides)) * multiple, max(1, next(sides)) * multiple


def bucket_size(width_px: int, height_px: int, area_px: int) -> tuple[int, int]:
    """(height, width) of HunyuanVideo 1.5's size for an image: one of `_buckets`, with the nearest ratio of sides on
    the side of the square, as its pipeline chooses with a `target_size` squared of `area_px`."""
    ratio = height_px / width_px
    buckets = [(round(height / width, 5), (height, width)) for height, width in _buckets(area_px)]
    nearer = [pair for pair in buckets if (pair[0] <= ratio if ratio >= 1 else pair[0] >= ratio)]
    return min(nearer, key=lambda pair: abs(pair[0] - ratio))[1]


@lru_cache(maxsize=64)
def _buckets(area_px: int) -> tuple[tuple[int, int], ...]:
    """(height, width) of the largest sizes of at most `area_px` pixels, from narrow to wide.

    Source: `generate_crop_size_list` in diffusers' pipelines/hunyuan_video1_5/image_processor.py.
    """
    most = round(area_px / BUCKET_PX**2)
    found, first, second = [], most, 1
    while first > 0:
        if max(first, second) / min(first, second) <= MAX_BUCKET_RATIO:
            found.append((first * BUCKET_PX, second * BUCKET_PX))
        if (second + 1) * first <= most:
            second += 1
        else:
            first -= 1
    return tuple(found)


IMAGE_SIZES = {
    "qwen_image_edit": ImageSizes(read=fitted_size, picture=fitted_size, shaped_by=-1),
    "flux_kontext": ImageSizes(read=preferred_size, picture=shaped_size, shaped_by=0),
    "flux2": ImageSizes(read=limited_size, picture=limited_size, shaped_by=0, check=check_flux2_image),
    "wan": ImageSizes(read=None, picture=floored_size, shaped_by=0),
    "wan_ti2v": ImageSizes(read=None, picture=partial(floored_size, multiple=TI2V_MULTIPLE), shaped_by=0),
    "hunyuan_video15": ImageSizes(read=None, picture=bucket_size, shaped_by=0),
}
"""Name in `digen.sampling.image_sizes` and `ModelSpec.image_sizes` -> rule."""
