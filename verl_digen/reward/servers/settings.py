# SPDX-License-Identifier: Apache-2.0
"""Settings of a server's client, shared by all rewards that ask one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

from verl_digen.require import In, require

SCHEMES = ("http", "https")


@dataclass(frozen=True)
class ServerSettings:
    """Addresses, deadlines and limits of a client.

    A URL holds no user, password or query: it appears in logs and messages. Proxies of the environment are not used.
    """

    url: Any = ""
    """One URL such as http://host:18085, or a list of servers that give the same scores."""
    token_env: str = ""
    """Environment variable with the bearer token. It must be set where the reward's processes run. The token itself is
    no setting, because a run's config is logged."""
    max_concurrency: Annotated[int, In("[1, 10000]")] = 4
    """Maximum requests in flight per URL, from each of the reward's processes."""
    connect_timeout_s: Annotated[float, In("(0, inf)")] = 5.0
    """Timeout of a connection, its name lookup included."""
    read_timeout_s: Annotated[float, In("(0, inf)")] = 120.0
    """Timeout between two pieces of an answer, and for the first one."""
    timeout_s: Annotated[float, In("(0, inf)")] = 240.0
    """Timeout of a call with its waits and retries. Below `digen.reward.timeout_s`, so that the message says more."""
    max_retries: Annotated[int, In("[0, 1000]")] = 5
    """Retries of a connection that failed, a status of 429 or 5xx, or an answer that cannot be used."""
    backoff_s: Annotated[float, In("[0, inf)")] = 0.5
    """Upper bound of the random wait before the first retry; it doubles with each further one."""

    def __post_init__(self) -> None:
        require(bool(self.urls), "url must be a URL or a list of URLs", self.url, "e.g. url: http://host:18085")
        for url in self.urls:
            require_url(url)
        require(
            len(set(self.urls)) == len(self.urls), "url must name each server once", list(self.urls), "take one out"
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs without a slash at the end."""
        given = tuple(self.url) if isinstance(self.url, list | tuple) else (self.url,)
        return tuple(url.rstrip("/") if isinstance(url, str) else url for url in given if url != "")


def require_url(url: Any) -> None:
    """Raise ValueError unless `url` is the plain address of a server. The message never shows a password."""
    example = "write e.g. http://host:18085"
    require(isinstance(url, str), "url must hold URLs", url, example)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"url must be a URL, got one that cannot be read ({error}); {example}") from error
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"url must not hold a user or a password, got one for {parts.hostname!r}; put a token into an environment "
            "variable and name it in token_env"
        )
    require(parts.scheme in SCHEMES, "url must begin with http:// or https://", url, example)
    require(bool(parts.hostname), "url must name a host", url, example)
    require(port != 0, "url must have a port in [1, 65535]", url, example)
    require(not parts.query and not parts.fragment, "url must end before ? and #", url, example)
    is_plain = url.isascii() and url.isprintable() and " " not in url
    require(is_plain, "url must hold plain characters alone", url, example)
