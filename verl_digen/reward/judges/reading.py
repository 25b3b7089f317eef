# SPDX-License-Identifier: Apache-2.0
"""Answer of a judge, and the score in it: a number in its text, or the probability of answers at its first token.

The thoughts of a reasoning model are what stands before the last `</think>`; the opening tag may be part of the chat
template, and so be missing. A server that separates them itself (`--reasoning-parser`) leaves them out of `content`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from verl_digen.reward.servers.answers import UnusableAnswer, shown

THINK_START, THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class Token:
    """One token of an answer."""

    text: str
    top: Mapping[str, Sequence[float]]
    """The likeliest tokens at its place: text -> log-probability of each token with that text."""


@dataclass(frozen=True)
class Reply:
    """An answer without its thoughts."""

    text: str
    is_cut: bool
    """True if it ended at `max_tokens`."""
    tokens: tuple[Token, ...] | None
    """Its tokens; None if the server sent no log-probabilities."""


def read_reply(body: Any) -> Reply:
    """Read the JSON of an answer. UnusableAnswer if it is not of the chat protocol, a refusal, filtered, empty of
    content, or nothing but thoughts."""
    choice = _first_choice(body)
    message, reason = choice["message"], choice.get("finish_reason")
    if message.get("refusal"):
        raise UnusableAnswer(f"the judge refused: {shown(message['refusal'])}")
    if reason == "content_filter":
        raise UnusableAnswer(f"the judge's service filtered its answer: {shown(message.get('content'))}")
    content, is_cut = message.get("content"), reason == "length"
    if not isinstance(content, str):
        raise UnusableAnswer(
            f"the judge's answer has no content{_thoughts(message)}"
            + ("; it ended at max_tokens while it thought: raise max_tokens" if is_cut else "")
        )
    end = _end_of_thoughts(content)
    if end is None:
        raise UnusableAnswer(
            f"the judge did not end its thoughts, {shown(content)}"
            + ("; it ended at max_tokens: raise max_tokens" if is_cut else "")
        )
    return Reply(content[end:].strip(), is_cut, _answer_tokens(choice.get("logprobs")))


def _first_choice(body: Any) -> Mapping[str, Any]:
    choices = body.get("choices") if isinstance(body, Mapping) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, Mapping) or not isinstance(first.get("message"), Mapping):
        raise UnusableAnswer(f"the judge's answer is not one of the chat protocol: {shown(body)}")
    return first


def _thoughts(message: Mapping[str, Any]) -> str:
    """Thoughts that the server separated, for a message; servers name them in two ways."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    return f", only thoughts, {shown(thoughts)}" if thoughts else ""


def _end_of_thoughts(text: str) -> int | None:
    """Start of the answer; None if its thoughts do not end."""
    end = text.rfind(THINK_END)
    if THINK_START in text[max(end, 0) :]:
        return None
    return 0 if end < 0 else end + len(THINK_END)


def _answer_tokens(logprobs: Any) -> tuple[Token, ...] | None:
    """Tokens after the thoughts."""
    listed = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(listed, list) or not listed:
        return None
    try:
        tokens = [Token(str(entry["token"]), _top(entry["top_logprobs"])) for entry in listed]
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableAnswer(f"the judge's logprobs do not follow the chat protocol: {shown(listed)}") from error
    end = _end_of_thoughts("".join(token.text for token in tokens)) or 0
    starts = accumulate((len(token.text) for token in tokens), initial=0)
    return tuple(token for token, start in zip(tokens, starts, strict=False) if start >= end)


def _top(listed: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    for entry in listed:
        text = str(entry["token"])
        found[text] = (*found.get(text, ()), float(entry["logprob"]))
    return found


MARKED_SPACES = str.maketrans("▁Ġ", "  ")
"""Signs for a space at the start of a token, as tokenizers write it and some servers pass on."""


def number_in(reply: Reply, pattern: re.Pattern[str], low: float, high: float, *, takes_last: bool) -> float:
    """The number that the pattern's first group finds in the text; of several, the last one with `takes_last`: a judge
    that reasons states its result at the end. UnusableAnswer if the text was cut off, has no such number, or one
    outside [low, high]."""
    if reply.is_cut:
        raise UnusableAnswer(f"the judge's answer ended at max_tokens: {shown(reply.text)}; raise max_tokens")
    found = [match.group(1) for match in pattern.finditer(reply.text)]
    if not found:
        raise UnusableAnswer(f"the judge's answer must match {pattern.pattern!r}, got {shown(reply.text)}")
    text = found[-1 if takes_last else 0]
    try:
        value = float(text)
    except (TypeError, ValueError):  # the group may match a word, or nothing
        raise UnusableAnswer(
            f"the pattern {pattern.pattern!r} must find a number, got {text!r} in {shown(reply.text)}"
        ) from None
    if not low <= value <= high:
        raise UnusableAnswer(
            f"the judge's number must lie in [{low:g}, {high:g}], got {value:g} in {shown(reply.text)}"
        )
    return value


def weighed(reply: Reply, values: Mapping[str, float]) -> dict[str, float]:
    """The expected value, `score`, of answers a with values v_a, each one token of the judge, at the first token that
    is not blank; `share` is their probability, near 1 where the judge keeps to the answers.

        p_a = sum of exp(logprob) over the likeliest tokens that are a, whatever their case and the space before them
        share = sum_a p_a, score = sum_a p_a v_a / share

    So {Yes: 1, No: 0} gives P(Yes) / (P(Yes) + P(No)). UnusableAnswer if the server sent no log-probabilities, the
    answer is blank, or none of the answers is among the likeliest tokens.

    Example:
        ln = math.log
        top = {"Yes": (ln(0.5),), " yes": (ln(0.1),), "No": (ln(0.2),), "Maybe": (ln(0.1),)}
        weighed(Reply("Yes", False, (Token("Yes", top),)), {"Yes": 1, "No": 0})  # {"score": 0.75, "share": 0.8}
    """
    if reply.tokens is None:
        raise UnusableAnswer(
            f"the judge's answer {shown(reply.text)} came without logprobs; use a server that sends them (vLLM, SGLang "
            "and OpenAI do), or a pattern"
        )
    first = next((token for token in reply.tokens if _plain(token.text)), None)
    if first is None:
        raise UnusableAnswer(f"the judge's answer is blank: {shown(reply.text)}; raise max_tokens if it thinks first")
    probabilities = {answer: _probability(first, answer) for answer in values}
    share = sum(probabilities.values())
    if share == 0:
        raise UnusableAnswer(
            f"none of {', '.join(values)} is among the likeliest tokens {_listed(first)} of the judge's answer "
            f"{shown(reply.text)}; ask for one of them, as one token"
        )
    total = sum(probabilities[answer] * value for answer, value in values.items())
    return {"score": total / share, "share": share}


def preferred(reply: Reply, first: str, second: str) -> float:
    """1 if the text holds `first`, 0 for `second`, in any case of letters. UnusableAnswer for both, or neither."""
    text = reply.text.lower()
    has_first, has_second = first.lower() in text, second.lower() in text
    if has_first == has_second:
        raise UnusableAnswer(
            f"the judge's answer must hold one of {first!r} and {second!r}, got {shown(reply.text)}"
            + ("; it ended at max_tokens: raise max_tokens" if reply.is_cut else "")
        )
    return 1.0 if has_first else 0.0


def require_distinct(values: Mapping[str, float], key: str) -> None:
    """Raise ValueError unless the answers are at least two, not blank, and differ in more than case and spaces."""
    plain = [_plain(answer) for answer in values]
    if len(plain) < 2 or len(set(plain)) < len(plain) or not all(plain):
        raise ValueError(
            f"{key} must name at least two answers that differ in more than case and spaces, got {dict(values)!r}; "
            "give e.g. {Yes: 1, No: 0}, in a yaml file with quotes around the answers"
        )


def _probability(token: Token, answer: str) -> float:
    wanted = _plain(answer)
    return sum(math.exp(logprob) for text, found in token.top.items() if _plain(text) == wanted for logprob in found)


def _plain(text: str) -> str:
    return text.translate(MARKED_SPACES).strip().lower()


def _listed(token: Token) -> str:
    return ", ".join(repr(text) for text in list(token.top)[:5]) or "(the server names none)"
