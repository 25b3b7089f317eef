# SPDX-License-Identifier: Apache-2.0
"""One exchange with a server: the request, its answer, and the errors of a call."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl_digen import require
from verl_digen.reward.base import RewardUnavailable

EXCERPT_CHARS = 200
"""Length of the beginning of an answer, or of a value in it, that a message shows."""
shown = partial(require.shown, most=EXCERPT_CHARS)


@dataclass(frozen=True)
class HttpRequest:
    """One HTTP request."""

    path: str
    """Appended to the URL; begins with a slash, or is empty."""
    body: bytes | None
    """None makes it a GET."""
    content_type: str = "application/octet-stream"


class UnusableAnswer(ValueError):
    """The answer is not what the protocol says; the message says what came. Raised by readers of answers."""


class Declined(ValueError):
    """The server says in its answer that it could not do what was asked; asking again would not help. Raised by readers
    of answers; the client makes it a `Refused`."""


class ServerError(RuntimeError):
    """A call failed; the message names the URL and says what came."""


class Refused(ServerError):
    """The server refused the request (3xx, 4xx, or `Declined`); asking again would not help."""


class RefusedForAll(Refused, RewardUnavailable):
    """The refusal concerns the token or the address, not the samples."""


class Failed(ServerError):
    """An attempt failed; another may not. `retry_after_s`: the server's own wish (Retry-After), in seconds."""

    def __init__(self, message: str, retry_after_s: float = 0.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unreachable(Failed, RewardUnavailable):
    """No connection; samples have nothing to do with it."""


def excerpt(body: bytes, content_type: str, secret: str = "") -> str:
    """Type, size and beginning of a body for a message, without `secret`."""
    text = body[: EXCERPT_CHARS + len(secret.encode())].decode(errors="replace")
    if secret:
        text = text.replace(secret, "***")
    cut = "..." if len(body) > EXCERPT_CHARS else ""
    return f"{content_type or 'no content type'}, {len(body)} bytes: {text[:EXCERPT_CHARS]!r}{cut}"


def json_of(body: bytes) -> Any:
    try:
        return json.loads(body)
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


def numbers_of(value: Any, length: int, where: str) -> list[float]:
    """Finite numbers, one per sample."""
    if not isinstance(value, list | tuple):
        raise UnusableAnswer(f"{where} must be a list, got {shown(value)}")
    if len(value) != length:
        raise UnusableAnswer(f"{where} must have one entry per sample, got {len(value)} for {length} samples")
    return [number_of(one, f"{where}[{place}]") for place, one in enumerate(value)]


def scores_of(found: Any, name: str, length: int) -> list[float]:
    """Finite numbers under `name` of a mapping, one per sample."""
    return numbers_of(entry_of(found, name), length, name)
