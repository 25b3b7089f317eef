# SPDX-License-Identifier: Apache-2.0
"""Pages of `digen watch` as a Starlette application: made on request, and again when a run has changed.

A page asks with HEAD whether its ETag is still the same, which makes no page, and loads itself again.

*Invariants (tests/report/test_watch.py):* names of requests are looked up among the runs that are found, no path is
made of them; nothing is written; no answer without the token, where there is one.
"""

import secrets
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, DispatchFunction, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from verl_digen.report.comparison import MAX_RUNS, compare
from verl_digen.report.page import collect, plotly, render, written_now
from verl_digen.report.runs import find_runs, line_of, signature
from verl_digen.tools.watch import LOOPBACK

MAX_SHARE = 0.1
"""Most of one core's time that goes into a page that is asked for again and again."""
MAX_PAGES = 8
"""Pages kept in memory, of a few MB each."""
Make = Callable[[dict[str, Path]], tuple[dict[str, Any], str]]
"""Runs -> data of a page, and its view, see `page.render`."""


class Pages:
    """HTML of pages, made again when a file of a run of theirs has changed. Thread-safe."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic):
        self._now_s, self._lock = now_s, threading.Lock()
        self._made: dict[str, tuple[str, str, float]] = {}
        """Page -> etag, HTML, and when it may be made again."""

    def etag(self, key: str, runs: dict[str, Path]) -> str:
        """Value that changes with the page. That of an older page, where it is too soon to make it again."""
        known = self._made.get(key)  # another thread may take it away
        if known is not None and self._now_s() < known[2]:
            return known[0]
        return sha256(repr([(name, signature(path)) for name, path in runs.items()]).encode()).hexdigest()[:16]

    def html(self, key: str, runs: dict[str, Path], make: Make) -> tuple[str, str]:
        """(etag, HTML). Raises ValueError: a file of a run is broken."""
        with self._lock:
            etag = self.etag(key, runs)
            if key not in self._made or self._made[key][0] != etag:
                began_s = self._now_s()
                data, view = make(runs)
                text = render({**data, "etag": f'"{etag}"', "is_live": True}, view, is_live=True)
                ended_s = self._now_s()
                self._made[key] = etag, text, ended_s + (ended_s - began_s) / MAX_SHARE
                while len(self._made) > MAX_PAGES:
                    self._made.pop(next(iter(self._made)))
            return etag, self._made[key][1]


def _guard(token: str | None, cookie: str) -> DispatchFunction:
    """Middleware that refuses requests without the token; without one, those that a page of another site sends to this
    machine."""

    async def guard(request: Request, pass_on: RequestResponseEndpoint) -> Response:
        name = request.url.hostname
        if token is None:
            return await pass_on(request) if name in LOOPBACK else _refusal(f"open localhost in place of {name}")
        if _is_equal(request.query_params.get("token"), token):
            answer = RedirectResponse(f"?{request.url.remove_query_params('token').query}")
            answer.set_cookie(cookie, token, httponly=True, samesite="lax")
            return answer
        if _is_equal(request.cookies.get(cookie), token):
            return await pass_on(request)
        return _refusal("open the address with the token that digen watch printed")

    return guard


def _is_equal(given: str | None, token: str) -> bool:
    return given is not None and secrets.compare_digest(given.encode(), token.encode())


def _refusal(text: str) -> Response:
    return PlainTextResponse(f"digen watch: {text}", status_code=403)


def make_app(root: Path, *, token: str | None = None, cookie: str = "digen-watch") -> Starlette:
    """The application. An address must carry the token once, and a browser keeps it under the name `cookie`; without a
    token no other machine reaches the server."""
    root, pages = root.resolve(), Pages()

    def answer(request: Request, runs: dict[str, Path], make: Make) -> Response:
        key, etag = str(request.url.query) + request.url.path, None
        try:
            if request.method == "HEAD":
                return Response(headers=_headers(pages.etag(key, runs)))
            etag, text = pages.html(key, runs, make)
        except (OSError, ValueError) as error:
            return PlainTextResponse(f"digen watch: {error}", status_code=503)
        return HTMLResponse(text, headers=_headers(etag))

    def overview(request: Request) -> Response:
        return answer(request, find_runs(root), lambda runs: (_list(root, runs), "list"))

    def one(request: Request) -> Response:
        return chosen(request, "name", lambda runs: (collect(next(iter(runs.values()))), "report"))

    def several(request: Request) -> Response:
        return chosen(request, "run", lambda runs: (compare(runs), "comparison"))

    def chosen(request: Request, parameter: str, make: Make) -> Response:
        found, names = find_runs(root), request.query_params.getlist(parameter)
        if unknown := [name for name in names if name not in found] or ([] if names else [""]):
            text = f"digen watch: there is no run {unknown[0]!r} below {root}; it was moved or removed"
            return PlainTextResponse(text, status_code=404)
        return answer(request, {name: found[name] for name in names}, make)

    def script(request: Request) -> Response:
        return Response(plotly(), media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})

    routes = [Route("/", overview), Route("/run", one), Route("/compare", several), Route("/plotly.js", script)]
    guard = Middleware(BaseHTTPMiddleware, dispatch=_guard(token, cookie))
    return Starlette(routes=routes, middleware=[guard, Middleware(GZipMiddleware)])


def _headers(etag: str) -> dict[str, str]:
    return {"ETag": f'"{etag}"', "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


def _list(root: Path, runs: dict[str, Path]) -> dict[str, Any]:
    """Data of the list, newest change first."""
    lines, broken = [], []
    for name, path in runs.items():
        try:
            lines.append(line_of(name, path))
        except (OSError, ValueError) as error:
            broken.append(f"{name} cannot be read: {error}")
    nothing = {} if runs else {"runs": f"No run below {root} yet. A run is shown as soon as it has begun."}
    return {
        **written_now(),
        "heading": {"name": "Runs"},
        "root": str(root),
        "runs": sorted(lines, key=lambda line: -line["changed_s"]),
        "broken": broken,
        "most_compared": MAX_RUNS,
        "missing": {"empty": nothing, "left_out": []},
    }
