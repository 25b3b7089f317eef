# SPDX-License-Identifier: Apache-2.0
"""Answers of a server, and the errors of a call that got none that can be used."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from verl_digen.reward.base import RewardUnavailable

EXCERPT_CHARS = 200
"""Length of the beginning of an answer that a message shows."""


@dataclass(frozen=True)
class Answer:
    """Complete answer with a status of 2xx, or one that the caller accepts."""

    status: int
    body: bytes
    content_type: str
    """Lower-case type without parameters."""
    url: str
    """Setting that named the server, for further requests to the same one."""


class UnusableAnswer(ValueError):
    """The answer is not what the protocol says; the message says what came. Raised by readers of answers."""


class Declined(ValueError):
    """The server says in its answer that it could not do what was asked; asking again would not help.

    Raised by readers of answers; the client makes it a `Refused`.
    """


class ServerError(RuntimeError):
    """A call failed; the message names the URL and says what came."""


class Refused(ServerError):
    """The server refused the request (3xx, 4xx, or `Declined`); asking again would not help."""


class RefusedForAll(Refused, RewardUnavailable):
    """The refusal concerns the token or the address, not the samples."""


class Failed(ServerError):
    """An attempt failed; another may not."""


class Unreachable(Failed, RewardUnavailable):
    """No connection; samples have nothing to do with it."""


class Paused(Failed):
    """The server asked to wait (429, or a status with Retry-After)."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


def retry_after_s(value: str | None, now: datetime) -> float | None:
    """Seconds of a Retry-After header, a number or a date; None if there is none or it cannot be read.

    Args:
        now: present time, with a time zone.
    """
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=timezone.utc)
    return max(0.0, (date - now).total_seconds())


def excerpt(body: bytes, content_type: str, secret: str = "") -> str:
    """Type, size and beginning of a body for a message, without `secret`."""
    text = body[: EXCERPT_CHARS + len(secret.encode())].decode(errors="replace")
    if secret:
        text = text.replace(secret, "***")
    cut = "..." if len(body) > EXCERPT_CHARS else ""
    return f"{content_type or 'no content type'}, {len(body)} bytes: {text[:EXCERPT_CHARS]!r}{cut}"
