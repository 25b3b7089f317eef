# SPDX-License-Identifier: Apache-2.0
"""Judges with a question of their own: UnifiedReward, reading of text, win rates."""

from collections import Counter

import numpy as np
import pytest

from tests.reward.contract import check_contract, make_picture, scores_of
from tests.reward.judges.chat_server import ChatServer, judge_of, likely, message, pictures_in, question_in
from verl_digen.reward.servers.answers import UnusableAnswer
from verl_digen.types import PromptRow, RewardInput

AXES = "Alignment Score (1-5): {0}\nCoherence Score (1-5): {1}\nStyle Score (1-5): {2}"


def sample_of(pixels=None, text="a cat", index=0, **row):
    pixels = make_picture(24, 40) if pixels is None else pixels
    return RewardInput(pixels, PromptRow(text, "test", None, uid="g", **row), index)


def score_of(judge, sample):
    return scores_of(judge, [sample])[0]


def shade(value, shape=(8, 8, 3)):
    return np.full(shape, value, np.uint8)


# -- UnifiedReward ----------------------------------------------------------------------------------------------


def test_unified_reward_asks_as_flow_grpo_does():
    with ChatServer(lambda request: "It is fine.\nFinal Score: 4.5") as server:
        assert score_of(judge_of("unified_reward", server), sample_of(text="a {cat}")) == (0.9, {})
    (asked,) = server.asked
    assert asked["temperature"] == 0.0 and pictures_in(asked)[0].shape == (512, 512, 3)
    question = question_in(asked)
    assert question.startswith("You are given a text caption and a generated image based on that caption. Your task is")
    assert question.endswith(
        "overall aesthetic appeal.\nBased on the above criteria, assign a score from 1 to 5 after 'Final Score:'.\n"
        "Your task is provided as follows:\nText Caption: [a {cat}]"
    )


def test_unified_reward_of_a_video_is_the_mean_over_its_frames():
    video = np.stack([shade(value) for value in (0, 10, 20, 30, 40)])
    scores = {0: 1, 20: 3, 40: 5}
    with ChatServer(lambda request: f"Final Score: {scores[int(pictures_in(request)[0][0, 0, 0])]}") as server:
        value, _ = score_of(judge_of("unified_reward", server, num_frames=3), sample_of(video))
    assert value == pytest.approx(0.6)


def test_unified_reward2_gives_the_mean_and_its_axes():
    with ChatServer(lambda request: AXES.format(2.694700002670288, 3.0, 4.5)) as server:
        value, details = score_of(judge_of("unified_reward2", server), sample_of(text="a cat"))
    assert value == pytest.approx(((2.694700002670288 + 3 + 4.5) / 3 - 1) / 4)
    assert details == {"alignment": 2.694700002670288, "coherence": 3.0, "style": 4.5}
    question = question_in(server.asked[0])
    assert "the image along the following axes (each rated from 1 to 5):\n- Alignment Score: How well" in question
    assert question.endswith(
        "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z\n\n"
        "Your task is provided as follows:\nText Caption: [a cat]"
    )


def test_unified_reward2_asks_about_the_physics_of_a_video():
    with ChatServer(lambda request: AXES.format(1, 5, 3).replace("Coherence", "Physics")) as server:
        value, details = score_of(judge_of("unified_reward2", server), sample_of(make_picture(8, 8, frames=20)))
    assert value == 0.5 and details == {"alignment": 1.0, "physics": 5.0, "style": 3.0}
    assert len(pictures_in(server.asked[0])) == 8 and "Physics Score (1-5): Y" in question_in(server.asked[0])


@pytest.mark.parametrize("answer", [AXES.format(1, 2, 6), AXES.format(1, 2, 3).replace("Style", "Taste")])
def test_an_axis_that_is_missing_or_out_of_range_is_a_failure(answer):
    with (
        ChatServer(lambda request: answer) as server,
        pytest.raises(UnusableAnswer, match=r"Style|must lie in \[1, 5\]"),
    ):
        score_of(judge_of("unified_reward2", server), sample_of())


# -- text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, value",
    [("open now", 1.0), ("open n0w", 1 - 1 / 7), ("", 0.0), (message("open now and so on and on", "length"), 1.0)],
)
def test_text_that_is_read_is_compared_with_the_quoted_text(answer, value):
    with ChatServer(lambda request: answer) as server:
        judge = judge_of("ocr_vlm", server)
        assert score_of(judge, sample_of(text='a sign that says "Open Now"'))[0] == pytest.approx(value)
    assert question_in(server.asked[0]).startswith("Please output only the text content from the image")


# -- win rates --------------------------------------------------------------------------------------------------


def group_of(shades):
    return [sample_of(shade(value), index=index) for index, value in enumerate(shades)]


def brighter(request):
    """A judge that likes bright pictures, and the first place a little: P(first) = 0.5 + difference / 100 + 0.1."""
    first, second = (int(picture[0, 0, 0]) for picture in pictures_in(request)[-2:])
    probability = 0.6 + (first - second) / 100
    return likely(**{"1": probability, "2": 1 - probability})


def test_win_rates_are_means_over_both_orders_so_that_the_place_does_not_count():
    with ChatServer(brighter) as server:
        rates = [value for value, _ in scores_of(judge_of("win_rate", server), group_of([0, 10, 20]))]
    assert len(server.asked) == 6
    assert rates == pytest.approx([0.5 - 0.15, 0.5, 0.5 + 0.15])


def test_one_order_costs_half_and_a_sample_cannot_meet_itself():
    with ChatServer(brighter) as server:
        scores_of(judge_of("win_rate", server, both_orders=False), group_of(range(0, 40, 10)))
    met = Counter(frozenset(int(one[0, 0, 0]) for one in pictures_in(asked)) for asked in server.asked)
    assert len(met) == 6 and set(met.values()) == {1} and all(len(pair) == 2 for pair in met)


def test_a_comparison_without_an_outcome_fails_the_group():
    with ChatServer(lambda request: "neither") as server, pytest.raises(UnusableAnswer, match="came without logprobs"):
        scores_of(judge_of("win_rate", server, max_asked_again=0), group_of([0, 10]))


def test_both_samples_follow_the_source_pictures(tmp_path):
    from PIL import Image

    Image.new("RGB", (4, 4), (99, 99, 99)).save(tmp_path / "source.png")
    samples = [sample_of(shade(value), images=(str(tmp_path / "source.png"),)) for value in (0, 10)]
    with ChatServer(brighter) as server:
        scores_of(judge_of("win_rate", server), samples)
    shown = sorted([int(picture[0, 0, 0]) for picture in pictures_in(asked)] for asked in server.asked)
    assert shown == [[99, 0, 10], [99, 10, 0]]


@pytest.mark.parametrize("name", ["yes_no", "unified_reward", "unified_reward2", "ocr_vlm"])
def test_judges_keep_the_contract_of_rewards(name):
    def answer(request):
        bright = float(np.mean([picture.mean() for picture in pictures_in(request)])) / 255
        axes = AXES.replace("Coherence", "Physics" if "video" in question_in(request) else "Coherence")
        return {
            "yes_no": likely(Yes=bright / 2, No=0.5 - bright / 2),
            "unified_reward": f"Final Score: {1 + 4 * bright:.3f}",
            "unified_reward2": axes.format(*[f"{1 + 4 * bright:.3f}"] * 3),
            "ocr_vlm": "a" * int(8 * bright),
        }[name]

    samples = [
        sample_of(make_picture(*size, seed=seed), text=f'{seed}: "aaaaaaaa"')
        for seed, size in enumerate([(64, 64), (48, 96), (17, 31)])
    ]
    small = {"size_px": 64} if name == "unified_reward" else {"max_px": 64}
    with ChatServer(answer) as server:
        check_contract(judge_of(name, server, **small), samples)
