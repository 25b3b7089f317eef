# SPDX-License-Identifier: Apache-2.0
"""Requests of judges, and their scores for all that a server may answer."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from PIL import Image

from tests.docs.blocks import blocks_of
from tests.reward.contract import make_picture, make_samples, scores_of
from tests.reward.judges.chat_server import MODEL, ChatServer, judge_of, likely, pictures_in, question_in
from verl_digen.config import RewardConfig
from verl_digen.reward.judges.chat import api_url, fitted
from verl_digen.reward.named import check
from verl_digen.reward.servers.answers import UnusableAnswer
from verl_digen.types import PromptRow, RewardInput

SCORE = {"question": "Rate {prompt}", "pattern": r"Score: (\d+)", "low": 0, "high": 10}


def sample_of(pixels=None, text="a cat", **row):
    return RewardInput(make_picture(24, 40) if pixels is None else pixels, PromptRow(text, "test", None, **row), 0)


def score_of(judge, sample=None):
    return scores_of(judge, [sample_of() if sample is None else sample])[0]


def test_a_request_has_every_field_of_the_protocol():
    with ChatServer(lambda request: "Score: 4") as server:
        judge = judge_of("judge", server, **SCORE, max_tokens=77, seed=5, system="Be strict.", request={"top_k": 1})
        assert score_of(judge) == (0.4, {"number": 4.0})
    (asked,) = server.asked
    system, user = asked.pop("messages")
    assert asked == {"model": MODEL, "temperature": 0.0, "max_tokens": 77, "seed": 5, "top_k": 1}
    assert system == {"role": "system", "content": "Be strict."} and user["role"] == "user"
    assert [part["type"] for part in user["content"]] == ["image_url", "text"]
    (method, path, headers, _) = server.requests[-1]
    assert (method, path, headers["Content-Type"]) == ("POST", "/v1/chat/completions", "application/json")
    assert "Authorization" not in headers


def test_a_request_for_probabilities_asks_for_them():
    with ChatServer(lambda request: likely(Yes=0.6, No=0.2)) as server:
        value, details = score_of(judge_of("yes_no", server))
    assert value == pytest.approx(0.75) and details == {"share": pytest.approx(0.8)}
    (asked,) = server.asked
    assert (asked["logprobs"], asked["top_logprobs"], asked["temperature"]) == (True, 20, 0.0)
    assert question_in(asked) == 'Does this figure show "a cat"? Please answer yes or no.'


@pytest.mark.parametrize("with_images, sizes", [(True, [(6, 4), (5, 5), (24, 40)]), (False, [(24, 40)])])
def test_source_pictures_come_before_the_sample(tmp_path, with_images, sizes):
    paths = (str(tmp_path / "b.png"), str(tmp_path / "a.png"))
    Image.new("RGB", (4, 6)).save(paths[0])
    Image.new("RGB", (5, 5)).save(paths[1])
    sample = sample_of(images=paths)
    with ChatServer(lambda request: "Score: 4") as server:
        score_of(judge_of("judge", server, **SCORE, with_images=with_images), sample)
    pictures = pictures_in(server.asked[0])
    assert [picture.shape[:2] for picture in pictures] == sizes and np.array_equal(pictures[-1], sample.pixels)


def test_answers_of_ones_own_are_weighed():
    with ChatServer(lambda request: likely(A=0.5, B=0.25, x=0.25)) as server:
        judge = judge_of("judge", server, question="A, B or C?", answers={"A": 1.0, "B": 0.5, "C": 0.0}, top_logprobs=5)
        assert score_of(judge)[0] == pytest.approx((0.5 + 0.125) / 0.75)
    assert server.asked[0]["top_logprobs"] == 5


def test_the_model_is_asked_for_once():
    with ChatServer(lambda request: "Score: 4", models=("served",)) as server:
        scores_of(judge_of("judge", server, **SCORE), make_samples())
    assert [path for method, path, *_ in server.requests if method == "GET"] == ["/v1/models"]
    assert {asked["model"] for asked in server.asked} == {"served"}


@pytest.mark.parametrize("models, found", [(("a", "b"), "a, b"), ((), "none")])
def test_a_server_of_several_models_or_none_needs_a_name(models, found):
    rule = f"must serve one, got {found}; set model=NAME"
    with ChatServer(lambda request: "Score: 4", models=models) as server, pytest.raises(ValueError, match=rule):
        score_of(judge_of("judge", server, **SCORE))


def test_a_sample_that_fails_fails_alone():
    answer = {True: "what?", False: "Score: 4"}
    with ChatServer(lambda request: answer["bad" in question_in(request)]) as server:
        judge = judge_of("judge", server, **SCORE, max_asked_again=0)
        error, good = asyncio.run(judge.score([sample_of(text="bad"), sample_of(text="good")]))
    assert isinstance(error, UnusableAnswer) and "what" in str(error) and good["score"] == 0.4


@pytest.mark.parametrize(
    "given, url",
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("https://host/compatible-mode/v1", "https://host/compatible-mode/v1"),
    ],
)
def test_the_version_is_added_to_a_url_without_a_path(given, url):
    assert api_url(given) == url


@pytest.mark.parametrize(
    "name, settings, rule",
    [
        ("judge", SCORE | {"question": ""}, "question must be a text"),
        ("judge", SCORE | {"question": "{prompt.x}"}, "nothing but names"),
        ("judge", SCORE | {"answers": {"Yes": 1, "No": 0}}, "pattern or answers must be given, and not both"),
        ("judge", SCORE | {"pattern": "Score: [0-9]+"}, "pattern must have a group"),
        ("judge", SCORE | {"pattern": "(Score"}, "pattern must be a regular expression"),
        ("judge", SCORE | {"low": 10}, r"low must be below high, .* got \[10.0, 10.0\]"),
        ("judge", {"question": "?", "answers": {"Yes": 1}}, "answers must name at least two answers"),
        ("yes_no", {"top_logprobs": 21}, r"top_logprobs must lie in \[1, 20\]"),
        ("yes_no", {"request": {"temperature": 1.0}}, r"request must leave out .* got \['temperature'\]"),
        ("win_rate", {"first": "1", "second": " 1"}, "first and second must name at least two answers"),
        ("judge", {"temperature": 0.0}, "temperature must be a setting of Question"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(name, settings, rule):
    for url in ("http://host:1", "reward_model"):  # also while the servers' addresses are unknown
        with pytest.raises(ValueError, match=rule):
            judge_of(name, url, **settings)


def test_a_judge_without_a_server_says_how_to_give_it_one():
    with pytest.raises(ValueError, match=r"yes_no: url=reward_model needs .*enable=true; set url="):
        judge_of("yes_no", "reward_model")


@pytest.mark.parametrize(
    "size, fits", [((64, 32), (64, 32)), ((65, 65), (64, 64)), ((2000, 500), (64, 16)), ((10, 5000), (1, 64))]
)
def test_a_picture_is_made_smaller_and_never_larger(size, fits):
    assert fitted(Image.new("RGB", size), 64).size == fits


# -- the examples of docs/judges.md are what Hydra takes from a shell, and pass the checks of a run ---------
PAGE = Path(__file__).parents[3] / "docs" / "judges.md"


def examples() -> list[str]:
    """Values of digen.reward.functions in the page, as a shell hands them on."""
    shell = [block for block in blocks_of(PAGE) if block.language == "bash"]
    words = [word for block in shell for command in block.commands for word in command]
    return [word for word in words if word.startswith("digen.reward.functions=")]


def test_the_page_has_an_example_of_every_judge():
    named = " ".join(examples())
    for name in ("reward: judge", "yes_no", "unified_reward:", "unified_reward2", "ocr_vlm", "win_rate"):
        assert name in named, name


@pytest.mark.parametrize("example", examples())
def test_an_example_passes_the_checks(example):
    functions = OverridesParser.create().parse_override(example).value()
    entries = RewardConfig(functions=functions).entries
    assert entries
    for entry in entries:
        check(entry)
