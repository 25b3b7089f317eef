# SPDX-License-Identifier: Apache-2.0
"""The environment that asks a vision-language model, against a server of the chat protocol in this process."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.reward.judges.chat_server import QUICK, ChatServer, message, pictures_in, question_in
from verl_digen.config import EnvironmentConfig
from verl_digen.environments.base import TurnResult
from verl_digen.environments.built_in import environment_class, environment_settings
from verl_digen.reward.servers.answers import ServerError, UnusableAnswer
from verl_digen.types import PromptRow


def made(server: ChatServer, **options: Any) -> Any:
    config = EnvironmentConfig(name="vlm_judge", options={"url": server.url, **QUICK, **options})
    found = environment_class(config)
    settings = environment_settings(config, found)
    return found(settings, found.make_shared(settings, torch.device("cpu")))


def said(score: Any, instruction: Any) -> str:
    return json.dumps({"score": score, "instruction": instruction})


def row(tmp_path: Path) -> PromptRow:
    path = tmp_path / "source.png"
    Image.new("RGB", (8, 8), (10, 10, 10)).save(path)
    return PromptRow("make it a winter scene", "test", None, uid="g", images=(str(path),))


async def play(environment: Any, prompt: PromptRow, shades: list[int]) -> list[TurnResult]:
    """Turns whose pictures have these shades."""
    assert (await environment.reset(prompt, 0)).text == prompt.text
    return [await environment.step(np.full((8, 8, 3), shade, np.uint8)) for shade in shades]


def test_it_sees_the_source_and_the_picture_and_asks_on(tmp_path: Path) -> None:
    answers = iter([said(5, " add snow "), f"```json\n{said(10, 'more')}\n```", said(2.5, "less")])
    with ChatServer(lambda request: next(answers)) as server:
        turns = asyncio.run(play(made(server), row(tmp_path), [50, 60, 70]))
    assert [turn.reward for turn in turns] == pytest.approx([0.5 / 3, 1 / 3, 0.25 / 3])
    assert [turn.done for turn in turns] == [False, False, True]
    assert turns[0].instruction.text == "add snow" and turns[0].instruction.images is None
    shades = [[int(picture[0, 0, 0]) for picture in pictures_in(request)] for request in server.asked]
    assert shades == [[10, 50], [10, 60], [10, 70]]
    assert "The task is: make it a winter scene\n" in question_in(server.asked[1])
    assert "The last instruction to the editor was: add snow\n" in question_in(server.asked[1])
    assert all(request["temperature"] == 0 for request in server.asked)


def test_an_episode_that_ends_early_earns_its_last_score_for_the_turns_left(tmp_path: Path) -> None:
    answers = iter([said(4, "on"), said(8, None)])
    with ChatServer(lambda request: next(answers)) as server:
        turns = asyncio.run(play(made(server, num_turns=4), row(tmp_path), [1, 2]))
    assert turns[-1].done and sum(turn.reward for turn in turns) == pytest.approx((0.4 + 3 * 0.8) / 4)


@pytest.mark.parametrize(
    "answer",
    [
        "Score: 5",
        said(5, ""),
        said(11, "on"),
        said(-1, "on"),
        said(True, "on"),
        said("5", "on"),
        said(float("nan"), "on"),
        said(5, 3),
        said(5, "x" * 3000),
        '{"score": 5}',
        '{"score": 5, "instruction": "on", "why": "so"}',
        "[5]",
        message(None, refusal="I cannot judge that."),
    ],
)
def test_an_answer_of_another_form_is_counted_and_asked_for_again(tmp_path: Path, answer: Any) -> None:
    answers = iter([answer, said(5, "on"), said(6, "on")])
    with ChatServer(lambda request: next(answers)) as server:
        turns = asyncio.run(play(made(server), row(tmp_path), [1, 2]))
    assert [turn.details["asked_again"] for turn in turns] == [1, 1]
    assert sum(turn.reward for turn in turns) == pytest.approx(1.1 / 3)


def test_a_judge_that_never_answers_well_fails_the_turn(tmp_path: Path) -> None:
    with ChatServer(lambda request: "no") as server, pytest.raises(UnusableAnswer, match=r"must be JSON .*asked 2"):
        asyncio.run(play(made(server), row(tmp_path), [1]))
    assert len(server.asked) == 2


def test_a_server_that_fails_is_an_error_and_no_score(tmp_path: Path) -> None:
    with ChatServer(lambda request: (500, {})) as server, pytest.raises(ServerError, match="environment vlm_judge"):
        asyncio.run(play(made(server), row(tmp_path), [1]))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": ""}, "url must be a URL"),
        ({"url": "reward_model"}, "url must be the address of a server"),
        ({"num_turns": 0}, "num_turns must be >= 1"),
        ({"max_score": 0.0}, "max_score must be > 0"),
        ({"question": "{prompt}"}, "question must be a text with only {task}"),
        ({"question": "{task} {"}, "question must be a text with only {task}"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], told: str) -> None:
    config = EnvironmentConfig(name="vlm_judge", options={"url": "http://host:1", **options})
    with pytest.raises(ValueError, match=told):
        environment_settings(config, environment_class(config))
