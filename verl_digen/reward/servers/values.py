# SPDX-License-Identifier: Apache-2.0
"""Values of an answer, checked: what is missing or no finite number is said, and never becomes a zero."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from verl_digen.require import require
from verl_digen.reward.servers.answers import Answer, UnusableAnswer

SHOWN_CHARS = 100


def json_of(answer: Answer) -> Any:
    """The answer's body as JSON without nan and infinities."""
    try:
        return json.loads(answer.body, parse_constant=_refuse_constant)
    except UnusableAnswer:
        raise
    except (ValueError, RecursionError) as error:
        raise UnusableAnswer(f"it is no JSON ({error})") from error


def entry_of(value: Any, name: str) -> Any:
    """`value[name]` of a mapping."""
    if not isinstance(value, Mapping):
        raise UnusableAnswer(f"it must be a mapping with {name!r}, got {shown(value)}")
    if name not in value:
        raise UnusableAnswer(f"it must have {name!r}, got {', '.join(map(repr, value)) or 'nothing'}")
    return value[name]


def number_of(value: Any, where: str) -> float:
    """A finite number."""
    if not isinstance(value, int | float):
        raise UnusableAnswer(f"{where} must be a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError as error:
        raise UnusableAnswer(f"{where} must be a number that a float can hold, got {shown(value)}") from error
    if not math.isfinite(number):
        raise UnusableAnswer(f"{where} must be a finite number, got {number}")
    return number


def list_of(value: Any, length: int, where: str) -> list[Any]:
    """A list with one entry per sample."""
    if not isinstance(value, list | tuple):
        raise UnusableAnswer(f"{where} must be a list, got {shown(value)}")
    if len(value) != length:
        raise UnusableAnswer(f"{where} must have one entry per sample, got {len(value)} for {length} samples")
    return list(value)


def numbers_of(value: Any, length: int, where: str) -> list[float]:
    """Finite numbers, one per sample."""
    return [number_of(one, f"{where}[{place}]") for place, one in enumerate(list_of(value, length, where))]


def shown(value: Any) -> str:
    """Beginning of a value for a message."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def require_weights(rewards: Mapping[str, float], example: str) -> None:
    """Raise ValueError unless `rewards` holds at least one finite weight."""
    remedy = f"name the server's rewards with their weights, e.g. rewards: {{{example}: 1.0}}"
    require(len(rewards) > 0, "rewards must name at least one reward of the server", dict(rewards), remedy)
    for name, weight in rewards.items():
        require(math.isfinite(weight), f"rewards.{name} must be a finite number", weight, remedy)


def headline(scores: Mapping[str, float], reward: str, chosen: str | None) -> float:
    """The sub-score that counts: the chosen one, else the one named like the reward, else the only one."""
    name = chosen if chosen is not None else reward
    if name in scores:
        return scores[name]
    if chosen is None and len(scores) == 1:
        return next(iter(scores.values()))
    known = ", ".join(scores) or "no number at all"
    raise UnusableAnswer(f"{reward} must have the sub-score {name!r}, got {known}; name one in metrics.{reward}")


def _refuse_constant(name: str) -> Any:
    raise UnusableAnswer(f"it holds {name}, which is no number of JSON")
