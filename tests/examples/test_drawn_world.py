# SPDX-License-Identifier: Apache-2.0
"""The drawn world of the tiny examples: its scenes and edits, their rewards, and the environment of edits."""

import asyncio
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shape_edit_reward
from drawn_edits import VALUES, Edit, all_edits, apply, edits_of, instruction, parse_instruction
from drawn_scenes import ANCHORS, BACKGROUNDS, COLOURS, RGB, SHAPES, Scene, all_scenes, caption, draw, parse_caption
from shapes_reward import compute_score

from verl_digen.config import EnvironmentConfig
from verl_digen.environments.base import Instruction, TurnResult
from verl_digen.environments.built_in import environment_class, environment_settings
from verl_digen.types import PromptRow

SHAPE_EDITS = str(Path(__file__).resolve().parents[2] / "examples" / "drawn_world" / "shape_edits.py:ShapeEdits")
SCENES = all_scenes()
SINGLE = [scene for scene in SCENES if scene.count == 1]
ONE_WRONG_LOSES = {"shape": 0.2, "colour": 0.2, "position": 0.1, "count": 0.1, "background": 0.1}
"""Attribute -> minimum loss of a clean drawing with only that attribute wrong."""
SCENE = Scene("circle", "red", "blue", 1, "left")
TARGET = apply(SCENE, parse_instruction("make it yellow"))
TRUTH = {"target": caption(TARGET), "changed": "colour"}
ROW = PromptRow("make it yellow", "tiny_edit", TRUTH, uid="g")


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


def test_every_caption_and_instruction_parses_back_and_others_are_refused():
    assert len({caption(scene) for scene in SCENES}) == len(SCENES) == 567
    assert [parse_caption(f" {caption(scene).upper()}\n") for scene in SCENES] == list(SCENES)
    assert [parse_instruction(instruction(edit).upper() + " ") for edit in all_edits()] == list(all_edits())
    with pytest.raises(
        ValueError, match=r"got .two red circle on a blue background.; colours: red, .*; backgrounds: black"
    ):
        parse_caption("two red circle on a blue background")
    with pytest.raises(ValueError, match=r"an instruction must be one of 'make it red', .* got 'paint it red'"):
        parse_instruction("paint it red")


def test_clean_drawings_score_at_least_0_97_and_each_wrong_attribute_loses_its_margin():
    rng = np.random.default_rng(1)
    lowest_loss = dict.fromkeys(ONE_WRONG_LOSES, 1.0)
    for scene in SCENES[::3]:
        right = score(draw(scene, 64, rng), scene)
        assert right >= 0.97
        for field, other in wrong_scenes(scene):
            lowest_loss[field] = min(lowest_loss[field], right - score(draw(other, 64, rng), scene))
    for field, margin in ONE_WRONG_LOSES.items():
        assert lowest_loss[field] >= margin, field


def test_flat_pictures_noise_and_pictures_without_a_background_score_little():
    rng = np.random.default_rng(2)
    for scene in SCENES[::5]:
        full = np.full((64, 64, 3), RGB[scene.background], np.uint8)
        full[3:-3, 3:-3] = RGB[scene.colour]
        assert score(full, scene) <= 0.1 and score(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8), scene) <= 0.1
        for colour in RGB.values():
            assert score(np.full((64, 64, 3), colour, np.uint8), scene) <= 0.0751


def test_a_video_scores_the_mean_of_its_frames_and_a_picture_of_another_kind_is_refused():
    scene = SCENES[10]
    frames = np.stack([draw(scene, 64, np.random.default_rng(6)), np.zeros((64, 64, 3), np.uint8)])
    assert score(frames, scene) == pytest.approx(np.mean([score(frame, scene) for frame in frames]))
    with pytest.raises(ValueError, match="must be uint8"):
        score(np.zeros((3, 64, 64), np.uint8), scene)


def test_an_edit_changes_its_attribute_and_nothing_else_and_never_hides_the_shape():
    for scene in SINGLE:
        for edit in edits_of(scene):
            before, after = asdict(scene), asdict(apply(scene, edit))
            assert {name for name in before if before[name] != after[name]} == {edit.attribute}
    with pytest.raises(ValueError, match="colour and background must differ"):
        apply(SCENE, Edit("colour", "blue"))


@pytest.mark.parametrize("attribute", VALUES)
def test_a_good_edit_beats_the_old_picture_and_one_that_loses_the_rest(attribute):
    def score_of(shown: Scene) -> dict[str, float]:
        return shape_edit_reward.compute_score("", drawn(shown), {"target": caption(target), "changed": attribute})

    for number in np.random.default_rng(1).permutation(len(SINGLE))[:24]:
        scene = SINGLE[number]
        target = apply(scene, next(edit for edit in edits_of(scene) if edit.attribute == attribute))
        good, old = score_of(target), score_of(scene)
        assert good["score"] > 0.97 and good["followed"] > 0.95
        assert old["kept"] > 0.9 and old["followed"] < 0.75 and good["score"] - old["score"] > 0.12
        other = next(one for one in edits_of(target) if one.attribute != attribute)
        assert score_of(apply(target, other))["kept"] < good["kept"] - 0.03


# -- the environment ------------------------------------------------------------------------------------------
def drawn(scene: Scene) -> np.ndarray:
    return draw(scene, 64, np.random.default_rng(0))


def made(**options: Any) -> Any:
    config = EnvironmentConfig(path=SHAPE_EDITS, options=options)
    found = environment_class(config)
    return found(environment_settings(config, found))


def played(seed: int, *, obeys: bool, **options: Any) -> list[tuple[Instruction, TurnResult]]:
    """An episode in which every picture shows what was asked for, or the first scene."""
    environment, scene, turns = made(**options), SCENE, []
    asked = environment.reset(ROW, seed)
    while True:
        scene = apply(scene, parse_instruction(asked.text))
        result = asyncio.run(environment.step(drawn(scene if obeys else SCENE)))
        turns.append((asked, result))
        if result.done:
            return turns
        asked = result.instruction


def test_an_obedient_episode_earns_one_and_an_idle_one_much_less():
    good, idle = ([turn.reward for _, turn in played(1, obeys=obeys)] for obeys in (True, False))
    assert len(good) == len(idle) == 3 and sum(good) > 0.97
    assert sum(idle) < 0.7 and idle[0] > idle[2], "what an early turn got wrong counts later"


def test_instructions_depend_on_the_seed_and_on_no_picture():
    def texts(seed, obeys):
        return [asked.text for asked, _ in played(seed, obeys=obeys, num_turns=5)]

    assert texts(7, True) == texts(7, False) and texts(7, True)[0] == ROW.text
    assert len({tuple(texts(seed, True)) for seed in range(8)}) > 6


@pytest.mark.parametrize(("text", "truth"), [("make it yellow", "a circle"), ("make it red", TRUTH)])
def test_prompts_of_another_kind_are_refused(text, truth):
    with pytest.raises(ValueError, match="ground truth of a prompt of shape_edits must be"):
        made().reset(PromptRow(text, "tiny_edit", truth, uid="g"), 0)
