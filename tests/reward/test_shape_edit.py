# SPDX-License-Identifier: Apache-2.0
"""Edits of the drawn world, and the reward for doing what an instruction says and keeping the rest."""

from dataclasses import asdict

import numpy as np
import pytest
from drawn_edits import (
    VALUES,
    Edit,
    all_edits,
    apply,
    edits_of,
    instruction,
    parse_instruction,
)
from drawn_scenes import Scene, all_scenes, caption, draw
from shape_edit_reward import compute_score

SINGLE = [scene for scene in all_scenes() if scene.count == 1]
SCENE = Scene("circle", "red", "blue", 1, "left")


def drawn(scene: Scene) -> np.ndarray:
    return draw(scene, 64, np.random.default_rng(0))


def score_of(scene: Scene, edit: Edit, shown: Scene) -> dict[str, float]:
    return compute_score("tiny_edit", drawn(shown), {"target": caption(apply(scene, edit)), "changed": edit.attribute})


def test_an_instruction_says_its_edit_and_no_two_are_alike():
    edits = all_edits()
    assert [parse_instruction(instruction(edit).upper() + " ") for edit in edits] == edits
    assert len({instruction(edit) for edit in edits}) == len(edits) == sum(map(len, VALUES.values()))
    with pytest.raises(ValueError, match=r"an instruction must be one of 'make it red', .* got 'paint it red'"):
        parse_instruction("paint it red")


def test_an_edit_changes_its_attribute_and_nothing_else():
    for scene in SINGLE:
        edits = edits_of(scene)
        assert {edit.attribute for edit in edits} == set(VALUES)
        for edit in edits:
            before, after = asdict(scene), asdict(apply(scene, edit))
            assert {name for name in before if before[name] != after[name]} == {edit.attribute}


def test_an_edit_never_hides_the_shape_and_one_that_does_is_refused():
    green = Scene("circle", "green", "blue", 1, "left")
    assert Edit("colour", "blue") not in edits_of(green) and Edit("background", "green") not in edits_of(green)
    with pytest.raises(ValueError, match="colour and background must differ"):
        apply(SCENE, Edit("colour", "blue"))
    with pytest.raises(ValueError, match="one shape, got 2"):
        apply(Scene("circle", "red", "blue", 2), Edit("colour", "green"))
    with pytest.raises(ValueError, match=r"position must be one of left, .* got 'nowhere'"):
        Edit("position", "nowhere")


@pytest.mark.parametrize("attribute", VALUES)
def test_a_good_edit_beats_the_old_picture_and_one_that_loses_the_rest(attribute):
    rng = np.random.default_rng(1)
    for number in rng.permutation(len(SINGLE))[:24]:
        scene = SINGLE[number]
        edit = next(edit for edit in edits_of(scene) if edit.attribute == attribute)
        target = apply(scene, edit)
        good, old = score_of(scene, edit, target), score_of(scene, edit, scene)
        assert good["score"] > 0.97 and good["followed"] > 0.95
        assert old["kept"] > 0.9 and old["followed"] < 0.75 and good["score"] - old["score"] > 0.12
        other = next(one for one in edits_of(target) if one.attribute != attribute)
        assert score_of(scene, edit, apply(target, other))["kept"] < good["kept"] - 0.03


def test_the_reward_refuses_other_references():
    with pytest.raises(ValueError, match=r"must be a mapping of .target. and .changed., got 'a red circle'"):
        compute_score("tiny_edit", drawn(SCENE), "a red circle")
    with pytest.raises(ValueError, match=r"changed. of shape_edit must be one of colour, .* got 'size'"):
        compute_score("tiny_edit", drawn(SCENE), {"target": caption(SCENE), "changed": "size"})
