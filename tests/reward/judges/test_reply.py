# SPDX-License-Identifier: Apache-2.0
"""Reading of an answer's JSON: thoughts, refusals, tokens."""

import pytest

from verl_digen.reward.judges.reply import SHOWN_CHARS, read_reply
from verl_digen.reward.servers.answers import UnusableAnswer


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
    assert "n" * SHOWN_CHARS in str(raised.value) and len(str(raised.value)) < SHOWN_CHARS + 100


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
    [
        ["<think>", "No", "</think>", "\n\n", "Yes"],
        ["<", "think", ">", "No", "</", "think", ">", "\n\n", "Yes"],
        ["No", "</think>", "\n\n", "Yes"],
        ["\n\n", "Yes"],
    ],
)
def test_tokens_of_thoughts_are_left_out(texts):
    """Even if the server has taken the thoughts out of the content."""
    tokens = read_reply(body_of("Yes", logprobs=[token(text, **{text: 0.0}) for text in texts])).tokens
    assert [found.text for found in tokens] == ["\n\n", "Yes"]


@pytest.mark.parametrize("logprobs", [None, []])
def test_missing_logprobs_are_none(logprobs):
    assert read_reply(body_of("Yes", logprobs=logprobs)).tokens is None


def test_logprobs_of_another_form_are_unusable():
    with pytest.raises(UnusableAnswer, match="not those of the chat protocol"):
        read_reply(body_of("Yes", logprobs=[{"token": "Yes", "logprob": -0.1}]))
