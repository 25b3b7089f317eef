# SPDX-License-Identifier: Apache-2.0
"""The environment of edits in the drawn world: its instructions, rewards and simulated times."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_edits import apply, parse_instruction
from drawn_scenes import Scene, caption, draw

from verl_digen.config import EnvironmentConfig
from verl_digen.environments.base import Instruction, TurnResult
from verl_digen.environments.registry import environment_class, environment_settings
from verl_digen.types import PromptRow

SHAPE_EDITS = str(Path(__file__).resolve().parents[2] / "examples" / "drawn_world" / "shape_edits.py:ShapeEdits")
SCENE = Scene("circle", "red", "blue", 1, "left")
TARGET = apply(SCENE, parse_instruction("make it yellow"))
TRUTH = {"target": caption(TARGET), "changed": "colour"}
ROW = PromptRow("make it yellow", "tiny_edit", TRUTH, uid="g")


def made(**options: Any) -> Any:
    config = EnvironmentConfig(path=SHAPE_EDITS, options=options)
    found = environment_class(config)
    return found(environment_settings(config, found))


def drawn(scene: Scene) -> np.ndarray:
    return draw(scene, 64, np.random.default_rng(0))


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


def test_details_are_means_over_the_turns():
    turns = [result for _, result in played(1, obeys=False, num_turns=2)]
    assert set(turns[-1].details) == {"followed", "kept"}
    assert np.mean(list(turns[-1].details.values())) == pytest.approx(sum(turn.reward for turn in turns))


def test_instructions_depend_on_the_seed_and_on_no_picture():
    def texts(seed, obeys):
        return [asked.text for asked, _ in played(seed, obeys=obeys, num_turns=5)]

    assert texts(7, True) == texts(7, False) and texts(7, True)[0] == ROW.text
    assert len({tuple(texts(seed, True)) for seed in range(8)}) > 6
    kinds = [parse_instruction(text).attribute for text in texts(7, True)]
    assert all(one != other for one, other in pairwise(kinds))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_turns": 0}, "num_turns must be >= 1, got 0"),
        ({"latency_s": -1.0}, r"latency_s must lie in \[0, 3600\], got -1.0"),
        ({"latency_spread": 9.0}, r"latency_spread must lie in \[0, 3\], got 9.0"),
        ({"turns": 3}, "options.turns must be a setting of ShapeEdits"),
    ],
)
def test_nonsense_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        made(**options)


@pytest.mark.parametrize(
    ("text", "truth", "told"),
    [
        ("a red circle", TRUTH, "an instruction must be one of"),
        ("make it yellow", "a circle", "must be a mapping of"),
        ("make it red", TRUTH, "must be the scene after its edit"),
        ("make it a circle", TRUTH, "must be the scene after its edit"),
    ],
)
def test_prompts_of_another_kind_are_refused(text, truth, told):
    with pytest.raises(ValueError, match=told):
        made().reset(PromptRow(text, "tiny_edit", truth, uid="g"), 0)
