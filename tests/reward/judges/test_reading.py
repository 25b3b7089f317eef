# SPDX-License-Identifier: Apache-2.0
"""Numbers in answers, and probabilities of answers, against sums by hand."""

import math
import re

import pytest

from verl_digen.reward.judges.chat import fields_of, filled
from verl_digen.reward.judges.reading import Reply, Token, number_in, preferred, read_reply, require_distinct, weighed
from verl_digen.reward.servers.answers import EXCERPT_CHARS, UnusableAnswer
from verl_digen.types import PromptRow

SCORE = re.compile(r"Score:\s*(-?\d+(?:\.\d+)?)")
YES_NO = {"Yes": 1.0, "No": 0.0}


def ln(*probabilities: float) -> tuple[float, ...]:
    return tuple(map(math.log, probabilities))


def reply_of(*tops, text: str = "Yes") -> Reply:
    """An answer whose tokens have these likeliest tokens; each is the first of its own."""
    return Reply(text, False, tuple(Token(next(iter(top)), top) for top in tops))


def test_yes_against_no_sums_case_and_spaces():
    top = {"Yes": ln(0.3, 0.1), " yes": ln(0.1), "YES": ln(0.05), "No": ln(0.2), "▁no": ln(0.05), "Maybe": ln(0.1)}
    found = weighed(reply_of(top), YES_NO)
    assert found["score"] == pytest.approx(0.55 / 0.8, abs=1e-12)
    assert found["share"] == pytest.approx(0.8, abs=1e-12)


def test_more_answers_give_the_expected_value():
    top = {"1": ln(0.1), "2": ln(0.2), "5": ln(0.5), "x": ln(0.2)}
    values = {str(number): (number - 1) / 4 for number in range(1, 6)}
    assert weighed(reply_of(top), values)["score"] == pytest.approx((0.2 * 0.25 + 0.5) / 0.8)


def test_the_first_token_that_is_not_blank_counts():
    blank = {"\n": ln(0.9), "Yes": ln(0.05)}
    assert weighed(reply_of(blank, {"No": ln(0.75), "Yes": ln(0.25)}), YES_NO)["score"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    "reply, message",
    [
        (Reply("Yes", False, None), "'Yes' came without logprobs"),
        (Reply("", False, ()), "blank"),
        (reply_of({"\n": ln(0.9)}), "blank"),
        (reply_of({"Maybe": ln(0.9), "Yesterday": ln(0.1)}, text="Maybe not"), "Yes, No is among the likeliest"),
    ],
)
def test_an_answer_without_yes_or_no_is_a_failure(reply, message):
    with pytest.raises(UnusableAnswer, match=message):
        weighed(reply, YES_NO)


def test_a_token_that_is_impossible_does_not_count():
    with pytest.raises(UnusableAnswer, match="likeliest"):
        weighed(reply_of({"Maybe": (0.0,), "Yes": (-9999.0,), "No": (-math.inf,)}), YES_NO)


@pytest.mark.parametrize("takes_last, number", [(False, 3.0), (True, 4.5)])
def test_the_first_or_the_last_number_is_read(takes_last, number):
    reply = Reply("Score: 3 at first. Score: 4.5", False, None)
    assert number_in(reply, SCORE, 1, 5, takes_last=takes_last) == number


@pytest.mark.parametrize("number", [1, 5])
def test_the_smallest_and_the_largest_number_count(number):
    assert number_in(Reply(f"Score: {number}", False, None), SCORE, 1, 5, takes_last=True) == number


@pytest.mark.parametrize(
    "text, is_cut, message",
    [
        ("a fine picture", False, "must match .* got 'a fine picture'"),
        ("Score: 10", False, r"must lie in \[1, 5\], got 10 in 'Score: 10'"),
        ("Score: 0.5", False, "got 0.5"),
        ("Score: 4", True, "ended at max_tokens: 'Score: 4'; raise max_tokens"),
    ],
)
def test_a_text_without_a_number_in_range_is_a_failure(text, is_cut, message):
    with pytest.raises(UnusableAnswer, match=message):
        number_in(Reply(text, is_cut, None), SCORE, 1, 5, takes_last=True)


@pytest.mark.parametrize("pattern", [r"Score: (\w+)", r"Score: (\d+)?"])
def test_a_group_that_finds_no_number_is_a_failure(pattern):
    with pytest.raises(UnusableAnswer, match="must find a number"):
        number_in(Reply("Score: four", False, None), re.compile(pattern), 1, 5, takes_last=True)


@pytest.mark.parametrize("text, outcome", [("So image 1 is better.", 1.0), ("IMAGE 2 IS BETTER", 0.0)])
def test_a_preference_is_found_whatever_its_case(text, outcome):
    assert preferred(Reply(text, False, None), "Image 1 is better", "Image 2 is better") == outcome


@pytest.mark.parametrize("text", ["both are good", "Image 1 is better. No: image 2 is better"])
def test_a_preference_for_both_or_neither_is_a_failure(text):
    with pytest.raises(UnusableAnswer, match="must hold one of"):
        preferred(Reply(text, False, None), "Image 1 is better", "Image 2 is better")


@pytest.mark.parametrize("answers", [{}, {"Yes": 1}, {"Yes": 1, " yes": 0}, {"Yes": 1, " ": 0}])
def test_answers_that_cannot_be_told_apart_are_refused(answers):
    with pytest.raises(ValueError, match="answers must name at least two answers"):
        require_distinct(answers, "answers")
    require_distinct(YES_NO, "answers")


# -- questions from templates --------------------------------------------------------------------------------
ROW = PromptRow("a {strange} cat", "test", {"count": 3}, extra={"tag": "counting", "none": None}, place="line 7 of 'x'")


def test_a_question_holds_the_rows_own_columns():
    asked = filled('{prompt}, {ground_truth}, {tag}, {{"score": 4}}', ROW, "judge: question")
    assert asked == "a {strange} cat, {'count': 3}, counting, {\"score\": 4}"


@pytest.mark.parametrize(
    "question", ["{", "a } b", "{prompt.__class__}", "{prompt[0]}", "{prompt!r}", "{prompt:>9}", "{}"]
)
def test_a_brace_with_more_than_a_name_is_refused(question):
    with pytest.raises(ValueError, match=r"judge\.question must .* twice"):
        fields_of(question, "judge.question")


@pytest.mark.parametrize("name", ["include", "none"])
def test_a_column_that_the_row_lacks_is_named_with_its_place(name):
    with pytest.raises(ValueError, match=rf"must name columns .*prompt, tag.*'{name}'; add it to the row \(line 7"):
        filled("{" + name + "}", ROW, "judge: question")


# -- reading of an answer's JSON: thoughts, refusals, tokens -------------------------------------------------
def body_of(content, *, reason="stop", logprobs=None, **message):
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": reason}
    return {"choices": [choice | ({} if logprobs is None else {"logprobs": {"content": logprobs}})]}


def token(text, **top):
    return {"token": text, "logprob": -0.1, "top_logprobs": [{"token": t, "logprob": p} for t, p in top.items()]}


@pytest.mark.parametrize(
    "content, text",
    [
        (" Final Score: 4\n", "Final Score: 4"),
        ("<think>Score: 1</think>\n\nScore: 4", "Score: 4"),
        ("thoughts whose opening tag is in the template</think>Score: 4", "Score: 4"),
        ("<think>a</think> b <think>c</think> Score: 4", "Score: 4"),
        ("</think>Score: 4", "Score: 4"),
        ("", ""),
    ],
)
def test_thoughts_are_left_out(content, text):
    assert read_reply(body_of(content)).text == text


@pytest.mark.parametrize(
    "body, message",
    [
        (body_of(None, refusal="I cannot help with that."), "refused: 'I cannot help with that.'"),
        (body_of("Sco", reason="content_filter"), "filtered its answer: 'Sco'"),
        (body_of(None), "has no content$"),
        (
            body_of(None, reason="length", reasoning_content="let me see"),
            "only thoughts, 'let me see'; .* raise max_to",
        ),
        (body_of(None, reason="length", reasoning="let me see"), "only thoughts, 'let me see'"),
        (body_of("<think>on and on", reason="length"), "did not end its thoughts, '<think>on and on'; .* raise max_t"),
        (body_of([{"type": "text", "text": "Yes"}]), "has no content"),
        ({"error": {"message": "no such model"}}, "not one of the chat protocol: .*no such model"),
        ({"choices": []}, "not one of the chat protocol"),
        ({"choices": [{"text": "Yes"}]}, "not one of the chat protocol"),
        ([1], "not one of the chat protocol"),
    ],
)
def test_what_gives_no_score_is_unusable_and_is_shown(body, message):
    with pytest.raises(UnusableAnswer, match=message):
        read_reply(body)


def test_a_long_answer_is_shown_by_its_start():
    with pytest.raises(UnusableAnswer) as raised:
        read_reply(body_of("x", refusal="n" * 5000))
    assert "n" * (EXCERPT_CHARS - 1) in str(raised.value) and len(str(raised.value)) < EXCERPT_CHARS + 100


def test_an_answer_that_was_cut_off_says_so():
    assert read_reply(body_of("Score: 4", reason="length")).is_cut
    assert not read_reply(body_of("Score: 4")).is_cut


def test_tokens_come_with_their_likeliest_ones():
    (found,) = read_reply(body_of("Yes", logprobs=[token("Yes", Yes=-0.1, No=-3.0)])).tokens
    assert found.text == "Yes" and found.top == {"Yes": (-0.1,), "No": (-3.0,)}


def test_tokens_of_equal_text_keep_all_their_probabilities():
    listed = [{"token": "Yes", "logprob": -1.0}, {"token": "Yes", "logprob": -2.0}]
    (found,) = read_reply(body_of("Yes", logprobs=[{"token": "Yes", "logprob": -1.0, "top_logprobs": listed}])).tokens
    assert found.top == {"Yes": (-1.0, -2.0)}


@pytest.mark.parametrize(
    "texts",
    [["<", "think", ">", "No", "</", "think", ">", "\n\n", "Yes"], ["No", "</think>", "\n\n", "Yes"], ["\n\n", "Yes"]],
)
def test_tokens_of_thoughts_are_left_out(texts):
    """Even if the server has taken the thoughts out of the content."""
    tokens = read_reply(body_of("Yes", logprobs=[token(text, **{text: 0.0}) for text in texts])).tokens
    assert [found.text for found in tokens] == ["\n\n", "Yes"]


@pytest.mark.parametrize("logprobs", [None, []])
def test_missing_logprobs_are_none(logprobs):
    assert read_reply(body_of("Yes", logprobs=logprobs)).tokens is None


def test_logprobs_of_another_form_are_unusable():
    with pytest.raises(UnusableAnswer, match="do not follow the chat protocol"):
        read_reply(body_of("Yes", logprobs=[{"token": "Yes", "logprob": -0.1}]))
