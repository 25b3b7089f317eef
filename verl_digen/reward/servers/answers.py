# SPDX-License-Identifier: Apache-2.0
"""One exchange with a server: the request, its answer, and the errors of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_digen.reward.base import RewardUnavailable

EXCERPT_CHARS = 200
"""Length of the beginning of an answer that a message shows."""


@dataclass(frozen=True)
class Request:
    """One HTTP request."""

    path: str
    """Appended to the URL; begins with a slash, or is empty."""
    body: bytes | None
    """None makes it a GET."""
    content_type: str = "application/octet-stream"
    headers: Mapping[str, str] = field(default_factory=dict)
    accept: tuple[int, ...] = ()
    """Statuses beside 2xx whose answer is read."""


@dataclass(frozen=True)
class Answer:
    """Complete answer with a status of 2xx, or one that the request accepts."""

    status: int
    body: bytes
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
    """An attempt failed; another may not.

    Args:
        retry_after_s: the server's own wish (Retry-After), in seconds.
    """

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
