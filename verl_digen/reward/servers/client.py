# SPDX-License-Identifier: Apache-2.0
"""`ServerClient`: HTTP with pooled connections, several URLs, deadlines, retries, and a circuit breaker per URL.

| what came | consequence |
| --- | --- |
| 2xx that `read` accepts | its result |
| no connection, a timeout, 5xx | retry, on another URL if one is free; counts for the breaker |
| half an answer, too large a one, one that `read` does not accept | the same |
| 429, or 503 with Retry-After | retry; the URL gets no request until then |
| 3xx, other 4xx, or `read` raises `Declined` | `Refused`, no retry |
| no success after 1 + `max_retries` attempts, or within `timeout_s` | the last error |

A call waits while every URL is busy, paused or has an open breaker; `timeout_s` bounds that, too. Waits before retries
are random below a bound that doubles (full jitter). A token goes into the header of requests and nowhere else.

Invariants (tests/reward/servers/test_client.py): never more than `max_concurrency` requests in flight per URL; a
refusal is never retried; no message holds the token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from math import inf
from typing import Any

from verl_digen.reward.packages import imported
from verl_digen.reward.servers.answers import (
    Answer,
    Declined,
    Failed,
    Paused,
    Refused,
    RefusedForAll,
    Unreachable,
    excerpt,
    retry_after_s,
)
from verl_digen.reward.servers.balancer import Balancer, Started
from verl_digen.reward.servers.cache import AnswerCache
from verl_digen.reward.servers.settings import ServerSettings

logger = logging.getLogger(__name__)

CHUNK_BYTES = 65536
STATUS_FOR_ALL = (401, 403, 404, 405, 407)
"""Refusals that concern the token or the address, not what was sent."""


def whole(answer: Answer) -> Answer:
    """Accept any answer."""
    return answer


@dataclass
class _Call:
    """One call and its attempts so far."""

    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]
    only: str | None
    read: Callable[[Answer], Any]
    accept: Collection[int] = ()
    num_attempts: int = 0
    failed_url: str | None = None
    last_error: str = "no URL was free"
    is_unreachable: bool = field(default=True)
    """No attempt so far reached a server."""


class ServerClient:
    """See the module. One event loop at a time; a new one gets new connections.

    Args:
        key: what messages call the user of the servers, such as `reward server`.
        rng: source of the random waits.

    Raises:
        ValueError: the variable of `token_env` is not set here, or a package is missing.
    """

    def __init__(self, settings: ServerSettings, key: str, *, rng: random.Random | None = None):
        self._settings, self._key = settings, key
        self._rng = random.Random() if rng is None else rng
        self._aiohttp: Any = imported("aiohttp", key)
        self._tenacity: Any = imported("tenacity", key)
        self._token = _token(settings.token_env, key)
        self._balancer = Balancer(
            settings.urls,
            max_concurrency=settings.max_concurrency,
            failures_to_open=settings.breaker_failures,
            cool_down_s=settings.breaker_cool_down_s,
        )
        self._session: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self.cache = AnswerCache(settings.cache_size)
        """Scores by content; filled by the caller."""

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        content_type: str,
        headers: Mapping[str, str] | None = None,
        only: str | None = None,
        accept: Collection[int] = (),
        read: Callable[[Answer], Any] = whole,
    ) -> Any:
        """Send a body -> what `read` makes of the answer.

        Args:
            path: appended to the URL; begins with a slash, or is empty.
            only: `Answer.url` of the server that the request must go to.
            accept: further statuses that `read` may read.
            read: reads an answer; raises ValueError (`UnusableAnswer`) if it cannot be used, which is retried, and
                `Declined` where that would not help.

        Raises:
            ServerError: see the module.
        """
        sent = {"Content-Type": content_type, **(headers or {})}
        return await self._finish(_Call("POST", path, body, sent, only, read, accept))

    async def get(self, path: str, *, only: str | None = None, read: Callable[[Answer], Any] = whole) -> Any:
        """Fetch `path` -> what `read` makes of the answer. Arguments and errors as in `post`."""
        return await self._finish(_Call("GET", path, None, {}, only, read))

    def take_counts(self) -> dict[str, int]:
        """Counts since the last time: `retries`, `breaker_openings`, `cache_hits`."""
        counts = {name: self._counts[name] for name in ("retries", "breaker_openings")}
        counts["cache_hits"], self.cache.num_hits = self.cache.num_hits, 0
        self._counts.clear()
        return counts

    async def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        if self._session is not None:
            await self._session.close()
        self._session = None

    async def _finish(self, call: _Call) -> Any:
        tenacity, settings = self._tenacity, self._settings
        await self._enter_loop()
        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(Failed),
            stop=tenacity.stop_after_attempt(1 + settings.max_retries),
            wait=lambda state: self._backoff_s(state.attempt_number),
            reraise=True,
        )
        try:
            return await asyncio.wait_for(attempts(self._attempt, call), settings.timeout_s)
        except asyncio.TimeoutError as error:
            cause, kind = f"no usable answer within timeout_s={settings.timeout_s}; {call.last_error}", Failed
            if call.is_unreachable:
                kind = Unreachable
            raise kind(self._told(call, cause)) from error
        except Failed as error:
            kind = Unreachable if isinstance(error, Unreachable) else Failed
            raise kind(self._told(call, str(error))) from error

    def _told(self, call: _Call, cause: str) -> str:
        return f"{self._key}: {cause} ({call.num_attempts} of {1 + self._settings.max_retries} attempts)"

    def _backoff_s(self, num_attempts: int) -> float:
        """Full jitter: uniform below a bound that doubles."""
        bound_s = self._settings.backoff_s * 2.0 ** min(num_attempts - 1, 60)
        return self._rng.uniform(0.0, min(bound_s, self._settings.max_backoff_s))

    async def _attempt(self, call: _Call) -> Any:
        if call.num_attempts:
            self._counts["retries"] += 1
        started = await self._started(call)
        call.num_attempts += 1
        try:
            result = await self._exchange(started.endpoint.url, call)
        except (Refused, Failed) as error:
            self._settle(started, call, error)
            raise
        except BaseException:  # cancelled, or a defect of `read`: nothing about the server
            self._balancer.cancelled(started)
            raise
        else:
            self._balancer.succeeded(started)
            return result
        finally:
            self._wake()

    def _settle(self, started: Started, call: _Call, error: Refused | Failed) -> None:
        """Note the outcome of an attempt that gave no result."""
        url = started.endpoint.url
        if isinstance(error, Refused):
            self._balancer.succeeded(started)
            return
        call.failed_url, call.last_error = url, str(error)
        call.is_unreachable = call.is_unreachable and isinstance(error, Unreachable)
        logger.debug("%s: attempt %d failed: %s", self._key, call.num_attempts, error)
        if isinstance(error, Paused):
            self._balancer.paused(started, self._now_s() + min(error.retry_after_s, self._settings.timeout_s))
        elif self._balancer.failed(started, self._now_s()):
            self._counts["breaker_openings"] += 1
            logger.warning(
                "%s: %s failed %d times in a row and gets no request for %g s; look at the server. Last: %s",
                *(self._key, url, self._settings.breaker_failures, self._settings.breaker_cool_down_s, error),
            )

    async def _started(self, call: _Call) -> Started:
        """Wait until a URL may have the request."""
        while True:
            found = self._balancer.start(self._now_s(), avoid=call.failed_url, only=call.only)
            if isinstance(found, Started):
                return found
            try:
                await asyncio.wait_for(self._changed.wait(), None if found == inf else found)
            except asyncio.TimeoutError:
                continue

    def _wake(self) -> None:
        """Let all that wait for a URL look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _exchange(self, url: str, call: _Call) -> Any:
        """One request -> what `read` makes of its answer."""
        aiohttp, where = self._aiohttp, f"{call.method} {url}{call.path}"
        headers = {**call.headers, **({"Authorization": f"Bearer {self._token}"} if self._token else {})}
        try:
            async with self._session.request(
                call.method, url + call.path, data=call.body, headers=headers, allow_redirects=False
            ) as response:
                body = await self._body(response, where)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(f"{where}: no connection: {self._redacted(error)}") from error
        except aiohttp.SocketTimeoutError as error:
            limit = f"read_timeout_s={self._settings.read_timeout_s}"
            raise Failed(f"{where}: nothing came within {limit}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Failed(f"{where}: the answer broke off: {self._redacted(error)}") from error
        came = excerpt(body, response.content_type, self._token)
        if response.status not in call.accept:
            self._require_success(response, f"{where}: status {response.status}, {came}")
        try:
            return call.read(Answer(response.status, body, response.content_type.lower(), url))
        except Declined as error:
            raise Refused(f"{where}: the server declined: {self._redacted(error)}") from None
        except ValueError as error:
            cause = None if self._token and self._token in str(error) else error  # logs show causes
            raise Failed(f"{where}: the answer cannot be used: {self._redacted(error)}; it is {came}") from cause

    async def _body(self, response: Any, where: str) -> bytes:
        """The whole body, if it is not too large."""
        limit, body = int(self._settings.max_answer_mb * 1e6), bytearray()
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            body += chunk
            if len(body) > limit:
                response.close()
                raise Failed(f"{where}: the answer is larger than max_answer_mb={self._settings.max_answer_mb}")
        return bytes(body)

    def _require_success(self, response: Any, message: str) -> None:
        """Raise the error that the status stands for, unless it is 2xx."""
        status = response.status
        if 200 <= status < 300:
            return
        wait_s = retry_after_s(response.headers.get("Retry-After"), datetime.now(timezone.utc))
        if status == 429 or (status == 503 and wait_s is not None):
            raise Paused(message, 0.0 if wait_s is None else wait_s)
        if status >= 500 or status < 200:
            raise Failed(message)
        if status < 400:
            raise RefusedForAll(f"{message}; redirects are not followed: name the new address in url")
        raise (RefusedForAll if status in STATUS_FOR_ALL else Refused)(message)

    def _redacted(self, error: Exception) -> str:
        """Text of an error without the token."""
        text = str(error) or type(error).__name__
        return text.replace(self._token, "***") if self._token else text

    async def _enter_loop(self) -> None:
        """Open connections in the running loop."""
        loop = asyncio.get_running_loop()
        if self._session is not None and self._loop is loop:
            return
        await self.close()
        aiohttp = self._aiohttp
        self._loop, self._changed = loop, asyncio.Event()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # the balancer limits
            timeout=aiohttp.ClientTimeout(
                total=None, connect=self._settings.connect_timeout_s, sock_read=self._settings.read_timeout_s
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


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
