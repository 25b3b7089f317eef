# SPDX-License-Identifier: Apache-2.0
"""Guarantees of the drawn world and its scorer."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from drawn_scenes import (
    ANCHORS,
    BACKGROUNDS,
    COLOURS,
    RGB,
    SHAPES,
    Scene,
    all_scenes,
    caption,
    draw,
    parse_caption,
)
from shapes_reward import compute_score

SCENES = all_scenes()
ONE_WRONG_LOSES = {"shape": 0.2, "colour": 0.2, "position": 0.1, "count": 0.1, "background": 0.1}
"""Attribute -> minimum loss of a clean drawing with only that attribute wrong."""


def score(picture, scene):
    return compute_score("digen_shapes", picture, caption(scene))["score"]


def wrong_scenes(scene):
    """Every scene that differs from `scene` in one attribute, with the attribute's name."""
    choices = {"shape": SHAPES, "colour": COLOURS, "background": BACKGROUNDS}
    if scene.count == 1:
        choices["position"] = tuple(ANCHORS)
    for field, values in choices.items():
        for value in values:
            changed = asdict(scene) | {field: value}
            if value != getattr(scene, field) and changed["colour"] != changed["background"]:
                yield field, Scene(**changed)
    for count in {1, 2, 3} - {scene.count}:
        yield "count", replace(scene, count=count, position="center" if count == 1 else None)


def test_every_caption_parses_back_to_its_scene():
    assert len({caption(scene) for scene in SCENES}) == len(SCENES) == 567
    for scene in SCENES:
        assert parse_caption(caption(scene)) == scene
        assert parse_caption(f" {caption(scene).upper()}\n") == scene


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a cat",
        "a red circle on a blue background",
        "a red circles on the left on a blue background",
        "two red circle on a blue background",
        "two red circles on the left on a blue background",
        "four red circles on a blue background",
    ],
)
def test_a_caption_outside_the_world_is_refused_with_rule_and_value(text):
    with pytest.raises(ValueError, match=r"colours: red, .*; backgrounds: black, ") as error:
        parse_caption(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("shape", "star"), ("count", 4), ("background", "red"), ("position", None), ("position", "corner")],
)
def test_a_scene_outside_the_world_is_refused(field, value):
    with pytest.raises(ValueError, match="must") as error:
        replace(parse_caption("a red circle on the left on a blue background"), **{field: value})
    assert repr(value) in str(error.value)


def test_a_drawing_depends_on_its_generator_alone():
    scene = SCENES[0]
    first, again, other = (draw(scene, 64, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert first.dtype == np.uint8 and first.shape == (64, 64, 3)
    assert (first == again).all() and (first != other).any()


@pytest.mark.parametrize("size_px", [64, 128, 256])
def test_clean_drawings_score_at_least_0_97(size_px):
    rng = np.random.default_rng(0)
    assert min(score(draw(scene, size_px, rng), scene) for scene in SCENES) >= 0.97


def test_each_single_wrong_attribute_loses_its_margin():
    rng = np.random.default_rng(1)
    lowest_loss = dict.fromkeys(ONE_WRONG_LOSES, 1.0)
    for scene in SCENES[::3]:
        right = score(draw(scene, 64, rng), scene)
        for field, other in wrong_scenes(scene):
            lowest_loss[field] = min(lowest_loss[field], right - score(draw(other, 64, rng), scene))
    for field, margin in ONE_WRONG_LOSES.items():
        assert lowest_loss[field] >= margin, field


def test_a_flat_picture_scores_at_most_0_075():
    for scene in SCENES[::5]:
        for colour in RGB.values():
            assert score(np.full((64, 64, 3), colour, np.uint8), scene) <= 0.0751


def test_noise_scores_at_most_0_1():
    rng = np.random.default_rng(2)
    for scene in SCENES[::5]:
        assert score(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8), scene) <= 0.1


def test_a_picture_without_room_for_a_background_scores_at_most_0_1():
    for scene in SCENES[::5]:
        picture = np.full((64, 64, 3), RGB[scene.background], np.uint8)
        picture[3:-3, 3:-3] = RGB[scene.colour]
        assert score(picture, scene) <= 0.1


def test_blur_and_a_little_noise_cost_little():
    rng = np.random.default_rng(3)
    for scene in SCENES[::5]:
        picture = draw(scene, 64, rng).astype(float)
        blurred = sum(np.roll(picture, shift, (0, 1)) for shift in ((0, 0), (0, 1), (1, 0), (1, 1))) / 4
        sloppy = np.clip(blurred + rng.normal(0, 8, blurred.shape), 0, 255).astype(np.uint8)
        assert score(sloppy, scene) >= 0.9


def test_a_video_scores_the_mean_of_its_frames():
    scene = SCENES[10]
    frames = np.stack([draw(scene, 64, np.random.default_rng(6)), np.zeros((64, 64, 3), np.uint8)])
    assert score(frames, scene) == pytest.approx(np.mean([score(frame, scene) for frame in frames]))


def test_ground_truth_may_be_the_fields_of_a_scene():
    scene = SCENES[-1]
    picture = draw(scene, 64, np.random.default_rng(7))
    assert compute_score("x", picture, asdict(scene)) == compute_score("y", picture, caption(scene))


@pytest.mark.parametrize(
    "picture", [np.zeros((64, 64, 3)), np.zeros((64, 64), np.uint8), np.zeros((3, 64, 64), np.uint8)]
)
def test_a_picture_of_another_kind_is_refused(picture):
    with pytest.raises(ValueError, match="must be uint8"):
        compute_score("x", picture, caption(SCENES[0]))
