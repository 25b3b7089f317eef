# SPDX-License-Identifier: Apache-2.0
"""HTTP server on a free port of this machine, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

RAN = Path(tempfile.gettempdir()) / f"verl_digen_pickle_was_run_{os.getpid()}"
"""File that a pickle makes if its code is run."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LocalServer:
    """Context manager; `handler` answers every request of any method and path.

    Keeps the requests as (method, path, headers, body), and the maximum number that were in flight together.
    """

    def __init__(self, handler: Handler):
        self._handler = handler
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.num_in_flight = self.max_in_flight = 0
        self._ready = threading.Event()

    def __enter__(self) -> LocalServer:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60), "the server did not start"
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not stop"

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        try:
            body = await request.read()
            self.requests.append((request.method, request.path, dict(request.headers), body))
            return await self._handler(request)
        finally:
            self.num_in_flight -= 1


def refusing_url() -> str:
    """URL of a port on which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"
