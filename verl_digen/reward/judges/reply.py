# SPDX-License-Identifier: Apache-2.0
"""Answer of a judge: its text and tokens without the thoughts of a reasoning model, or why it cannot be used.

Thoughts are what stands before the last `</think>`; the opening tag may be part of the chat template, and so be
missing. A server that separates them itself (`--reasoning-parser`) leaves them out of `content`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_digen.reward.servers.answers import UnusableAnswer

SHOWN_CHARS = 200
"""Characters of an answer in a message."""
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
    """Read the JSON of an answer.

    Raises:
        UnusableAnswer: it is not of the chat protocol, a refusal, filtered, empty of content, or nothing but thoughts.
    """
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


def shown(text: Any) -> str:
    """The start of a text, for a message."""
    text = str(text)
    return repr(text[:SHOWN_CHARS]) + ("..." if len(text) > SHOWN_CHARS else "")


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
        raise UnusableAnswer(f"the judge's logprobs are not those of the chat protocol: {shown(listed)}") from error
    end = _end_of_thoughts("".join(token.text for token in tokens)) or 0
    starts, position = [], 0
    for token in tokens:
        starts.append(position)
        position += len(token.text)
    return tuple(token for token, start in zip(tokens, starts, strict=True) if start >= end)


def _top(listed: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    for entry in listed:
        text = str(entry["token"])
        found[text] = (*found.get(text, ()), float(entry["logprob"]))
    return found
