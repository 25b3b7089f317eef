# SPDX-License-Identifier: Apache-2.0
"""Rules of sizes against what each pipeline itself does with an image."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.flux2 import pipeline_flux2_klein
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor
from PIL import Image

from tests.models.cases import draw_image
from tests.tiny_models import build_tiny
from verl_digen.config import DigenConfig
from verl_digen.config.sampling import SamplingConfig
from verl_digen.inputs.sizes import IMAGE_SIZES, KONTEXT_SIZES, check_flux2_image
from verl_digen.models import MODELS, model_class
from verl_digen.models.flux_kontext import FluxKontext
from verl_digen.sampling.requests import geometry_of, planned_geometry, sample_request, turn_request
from verl_digen.types import Geometry, PromptRow

SHAPES = ((1000, 1000), (4000, 3000), (64, 128), (333, 1024), (1023, 127), (97, 64), (2000, 250), (640, 633))
"""(width, height) px of images."""


class Stopped(Exception):
    """The call was seen, and the rest is not needed."""


def seen(owner: Any, name: str, call: Any) -> tuple[Any, ...]:
    """Arguments of the first call of method `name`, at which `call` stops."""
    found: list[tuple[Any, ...]] = []

    def note(*given: Any, **more: Any) -> None:
        found.append((*given, *more.values()))
        raise Stopped

    with patch.object(owner, name, note), pytest.raises(Stopped):
        call()
    return found[0]


@pytest.fixture(scope="module")
def kontext(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = build_tiny("flux_kontext", tmp_path_factory.mktemp("sizes") / "c")
    return pipeline_flux_kontext.FluxKontextPipeline.from_pretrained(path)


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = build_tiny("flux2_klein", tmp_path_factory.mktemp("sizes") / "c")
    return pipeline_flux2_klein.Flux2KleinPipeline.from_pretrained(path)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != (1023, 127)], ids=str)
def test_klein_reads_an_image_and_shapes_a_picture_at_the_size_of_the_pipeline(klein: Any, shape: Any) -> None:
    image = Image.new("RGB", shape)
    _, height, width, mode = seen(klein.image_processor, "preprocess", lambda: klein(image, "a"))
    for rule in (IMAGE_SIZES["flux2"].read, IMAGE_SIZES["flux2"].picture):
        assert rule(*shape, 1024 * 1024) == (height, width) and mode == "crop"


@pytest.mark.parametrize(
    "shape", [(64, 64), (63, 64), (64, 63), (512, 64), (513, 64), (64, 513), (4000, 3000)], ids=str
)
def test_images_that_klein_refuses_are_those_of_the_pipeline(klein: Any, shape: tuple[int, int]) -> None:
    def refused(check: Any) -> bool:
        try:
            check()
        except ValueError:
            return True
        return False

    of_pipeline = refused(lambda: klein.image_processor.check_image_input(Image.new("RGB", shape)))
    assert refused(lambda: check_flux2_image(*shape, "a.png")) == of_pipeline


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((63, 80), r"sides of 64 px or more, got 63 x 80 px in .*; enlarge it"),
        ((640, 70), r"a long side of at most 8 times the short one, got 640 x 70 px in .*; crop it"),
    ],
)
def test_a_request_for_klein_with_an_image_that_it_refuses_is_an_error(tmp_path: Any, shape: Any, message: str) -> None:
    image = draw_image(tmp_path / "a.png", shape)
    prompt = PromptRow("make it red", "", None, uid="p0", images=(image.reference,))
    for rule in ("flux_kontext", "flux2"):
        digen = DigenConfig(sampling=SamplingConfig(image_sizes=rule))
        if rule == "flux_kontext":
            assert sample_request(digen, prompt, 0, step=0, validate=True).inputs.images == (image,)
            continue
        with pytest.raises(ValueError, match=message):
            sample_request(digen, prompt, 0, step=0, validate=True)
        with pytest.raises(ValueError, match=message):
            turn_request(digen, prompt, 0, 1, (image,), step=0, validate=True)


def test_the_sizes_of_kontext_are_the_pipelines() -> None:
    assert list(KONTEXT_SIZES) == pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kontext_reads_an_image_at_the_size_of_the_pipeline(kontext: Any, shape: tuple[int, int]) -> None:
    image = Image.new("RGB", shape)
    _, height, width = seen(kontext.image_processor, "resize", lambda: kontext(image, "a"))
    assert IMAGE_SIZES["flux_kontext"].read(*shape, 1024 * 1024) == (height, width)


@pytest.mark.parametrize("area", [512 * 512, 1024 * 1024, 640 * 400])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_picture_of_kontext_has_the_size_of_the_pipeline(kontext: Any, shape: tuple[int, int], area: int) -> None:
    asked = {"width": shape[0], "height": shape[1], "max_area": area}
    given = seen(kontext, "check_inputs", lambda: kontext(prompt="a", **asked))
    assert IMAGE_SIZES["flux_kontext"].picture(*shape, area) == given[2:4]
    of_model = FluxKontext.pipeline_size(object.__new__(FluxKontext), Geometry(*given[2:4]))
    assert seen(kontext, "check_inputs", lambda: kontext(prompt="a", **of_model))[2:4] == given[2:4]


@pytest.mark.parametrize("rule", IMAGE_SIZES)
def test_smaller_areas_give_smaller_images_of_about_that_shape(rule: str) -> None:
    sizes = IMAGE_SIZES[rule]
    for read in (sizes.picture,) if sizes.read is None else (sizes.read, sizes.picture):
        height, width = read(900, 600, 256 * 256)
        assert height % 16 == width % 16 == 0 and abs(width / height - 1.5) < 0.2
        assert 0.8 < height * width / 256**2 < 1.1
        assert min(read(20_000, 3, 64 * 64)) >= 16, "a line keeps a side that a network can read"


def test_every_model_that_reads_images_names_a_rule() -> None:
    for pipeline in MODELS:
        spec = model_class(pipeline).spec
        assert spec.image_sizes in (IMAGE_SIZES if spec.num_images[1] else ("",)), pipeline


def test_the_image_that_shapes_the_picture_is_that_of_the_rule() -> None:
    images = [(900, 600), (600, 900)]
    shapes = {}
    for rule in IMAGE_SIZES:
        made = geometry_of(SamplingConfig(size_from_image=True, image_sizes=rule), images)
        shapes[rule] = made.width_px > made.height_px
    first = dict.fromkeys(("flux_kontext", "flux2", "wan", "wan_ti2v", "hunyuan_video15"), True)
    assert shapes == {"qwen_image_edit": False, **first}


def test_as_many_images_are_planned_as_the_config_says() -> None:
    asked = {"image_px": 64, "image_sizes": "flux_kontext"}
    assert planned_geometry(SamplingConfig(**asked), 0).sources == ()
    assert planned_geometry(SamplingConfig(**asked), 1).sources == ((64, 64),)
    assert planned_geometry(SamplingConfig(planned_images=1, **asked), 0).sources == ((64, 64),)
    with pytest.raises(ValueError, match=r"digen\.sampling\.planned_images must be null or >= 0, got -1; null is"):
        SamplingConfig(planned_images=-1)


# -- sizes from images, against the pipelines and examples whose rules they are ------------------------------
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
