# SPDX-License-Identifier: Apache-2.0
"""`ServerClient`: HTTP with pooled connections, one or several servers in turn, deadlines and retries.

| what came | consequence |
| --- | --- |
| 2xx that `read` accepts | its result |
| no connection, a timeout, 429, 5xx, half an answer, too large a one, one that `read` does not accept | retry |
| 3xx, other 4xx, or `read` raises `Declined` | `Refused`, no retry |
| no success after 1 + `max_retries` attempts, or within `timeout_s` | the last error |

Calls begin with the servers in turn, and a retry goes to the next one. Waits before retries are random below a bound
that doubles (full jitter), and as long as the server's Retry-After asks for. A token goes into the header of requests
and nowhere else.
"""

import asyncio
import itertools
import os
import random
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx

from verl_digen.require import In, require
from verl_digen.reward.servers.answers import (
    Declined,
    Failed,
    HttpRequest,
    Refused,
    RefusedForAll,
    Unreachable,
    excerpt,
)

SCHEMES = ("http", "https")


@dataclass(frozen=True)
class ServerSettings:
    """Addresses, deadlines and limits of a client. A URL holds no user, password or query: it appears in logs and
    messages. Proxies of the environment are not used."""

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


MAX_BACKOFF_S = 10.0
"""Upper bound of the random wait before any retry."""
MAX_ANSWER_BYTES = 64_000_000
"""Maximum size of an answer, unpacked."""
STATUS_FOR_ALL = (401, 403, 404, 405, 407)
"""Refusals that concern the token or the address, not what was sent."""


class ServerClient:
    """Client of the servers of the settings, or of `urls`. Messages call their user `key`, such as `reward judge`. One
    event loop at a time; a new one gets new connections. ValueError if the variable of `token_env` is not set here."""

    def __init__(self, settings: ServerSettings, key: str, urls: Sequence[str] | None = None):
        self._settings, self._key = settings, key
        self._urls = settings.urls if urls is None else tuple(urls)
        self._token = _token(settings.token_env, key)
        self._calls = itertools.count()
        self._num_retries = 0
        self._connections: dict[str, httpx.AsyncClient] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def send(self, request: HttpRequest, read: Callable[[bytes], Any] = bytes) -> Any:
        """Send a request -> what `read` makes of the answer. `read` raises ValueError (`UnusableAnswer`) if it cannot
        be used, which is retried, and `Declined` where that would not help. ServerError: see the module."""
        settings, start = self._settings, next(self._calls)
        last: Failed | None = None
        num_attempts = 0

        async def attempts() -> Any:
            nonlocal last, num_attempts
            while True:
                url = self._urls[(start + num_attempts) % len(self._urls)]
                self._num_retries += num_attempts > 0
                num_attempts += 1
                try:
                    return await self._exchange(url, request, read)
                except Failed as error:
                    last = error
                    if num_attempts > settings.max_retries:
                        raise
                bound_s = min(settings.backoff_s * 2.0 ** min(num_attempts - 1, 60), MAX_BACKOFF_S)
                await asyncio.sleep(max(random.uniform(0.0, bound_s), last.retry_after_s))

        try:
            return await asyncio.wait_for(attempts(), settings.timeout_s)
        except asyncio.TimeoutError as error:
            is_reached = last is not None and not isinstance(last, Unreachable)
            cause = f"no usable answer within timeout_s={settings.timeout_s}; {last or 'none came'}"
            raise (Failed if is_reached else Unreachable)(self._told(cause, num_attempts)) from error
        except Failed as error:
            raise type(error)(self._told(str(error), num_attempts)) from error

    def take_counts(self) -> dict[str, int]:
        """Retries since the last time."""
        counts, self._num_retries = {"retries": self._num_retries}, 0
        return counts

    def _told(self, cause: str, num_attempts: int) -> str:
        return f"{self._key}: {cause} ({num_attempts} of {1 + self._settings.max_retries} attempts)"

    async def _exchange(self, url: str, request: HttpRequest, read: Callable[[bytes], Any]) -> Any:
        """One request -> what `read` makes of its answer."""
        method = "GET" if request.body is None else "POST"
        where = f"{method} {url}{request.path}"
        headers = {"Content-Type": request.content_type}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            async with self._connected(url).stream(
                method, url + request.path, content=request.body, headers=headers
            ) as response:
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise Failed(f"{where}: the answer is larger than {MAX_ANSWER_BYTES / 1e6:g} MB")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreachable(f"{where}: no connection: {self._redacted(error)}") from error
        except httpx.ReadTimeout as error:
            raise Failed(f"{where}: nothing came within read_timeout_s={self._settings.read_timeout_s}") from error
        except httpx.HTTPError as error:
            raise Failed(f"{where}: the answer broke off: {self._redacted(error)}") from error
        came = excerpt(bytes(body), response.headers.get("Content-Type", "").partition(";")[0], self._token)
        _require_success(response, f"{where}: status {response.status_code}, {came}")
        try:
            return read(bytes(body))
        except Declined as error:
            raise Refused(f"{where}: the server declined: {self._redacted(error)}") from None
        except ValueError as error:
            cause = None if self._token and self._token in str(error) else error  # logs show causes
            raise Failed(f"{where}: the answer cannot be used: {self._redacted(error)}; it is {came}") from cause

    def _redacted(self, error: Exception) -> str:
        """Text of an error without the token."""
        text = str(error) or type(error).__name__
        return text.replace(self._token, "***") if self._token else text

    def _connected(self, url: str) -> httpx.AsyncClient:
        """Connections to a server, of the running loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._connections = loop, {}
        if url not in self._connections:
            settings = self._settings
            self._connections[url] = httpx.AsyncClient(
                limits=httpx.Limits(max_connections=settings.max_concurrency),
                timeout=httpx.Timeout(settings.read_timeout_s, connect=settings.connect_timeout_s, pool=None),
                trust_env=False,
                verify=ssl.create_default_context(),  # the system's certificates
            )
        return self._connections[url]


def _require_success(response: httpx.Response, message: str) -> None:
    """Raise the error that the status stands for, unless it is 2xx."""
    status, wish = response.status_code, response.headers.get("Retry-After", "")
    if 200 <= status < 300:
        return
    if status == 429 or not 200 <= status < 500:
        raise Failed(message, float(wish) if wish.isascii() and wish.isdigit() else 0.0)
    if status < 400:
        raise RefusedForAll(f"{message}; redirects are not followed: name the new address in url")
    raise (RefusedForAll if status in STATUS_FOR_ALL else Refused)(message)


def _token(variable: str, key: str) -> str:
    """Value of the environment variable; empty without one."""
    if not variable:
        return ""
    token = os.environ.get(variable, "").strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        state = "is not a token of plain characters" if token else "is not set or empty"
        raise ValueError(
            f"{key}: token_env must name an environment variable with a token, got {variable!r}, which {state} in "
            f"the reward's process on {os.uname().nodename}; export it before ray start on every node"
        )
    return token
