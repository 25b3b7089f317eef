# SPDX-License-Identifier: Apache-2.0
"""The HTTP API of a replica (`digen.rollout.http`): pictures from the current policy, for people.

| route | answer |
| --- | --- |
| `GET /health` | 200; 503 while the replica sleeps |
| `GET /v1/models` | the checkpoint's name |
| `POST /v1/images/generations` | base64 PNGs, in the format of OpenAI's images API |

- The app has only these routes: no administration, no documentation, no file upload, no fetching of URLs.
- A picture is a validation sample of the newest weights. It counts as in flight like a training sample, so a replica
  finishes it before it sleeps or loads weights.
- `Door` guards every route: it checks host name, key, content type and body size. There are no CORS headers, so
  browsers do not let web pages read the answers.

Invariants (tests/rollout/test_http_api.py): a path outside the table is 404; without the key everything is 401; a
request beyond a limit never reaches the engine.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import secrets
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from verl_digen.config import DigenConfig
from verl_digen.inputs import PromptInputs
from verl_digen.loopback import is_loopback
from verl_digen.sampling.requests import ODE_ONLY
from verl_digen.types import Geometry, SampleRequest, Sampling

RETRY_AFTER_S = 5
"""Value of the Retry-After header of a 503: a colocated replica sleeps for seconds to minutes."""
BODY_TIMEOUT_S = 30.0
"""Timeout for a client's body; 408 after that."""

Draw = Callable[[SampleRequest], Awaitable[Tensor]]
"""One sample -> pixels, uint8 [H, W, 3]. Raises ValueError for a request that the model refuses."""


class ImageRequest(BaseModel):
    """Body of `POST /v1/images/generations`; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(min_length=1)
    negative_prompt: str | None = None
    """null: `digen.sampling.negative_prompt`."""
    n: int = Field(default=1, ge=1)
    """Number of pictures."""
    size: str | None = Field(default=None, pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")
    """WIDTHxHEIGHT in px; null: `digen.sampling.width_px` and `height_px`."""
    num_inference_steps: int | None = Field(default=None, ge=2)
    """null: `digen.sampling.val_num_steps`."""
    true_cfg_scale: float | None = Field(default=None, ge=1.0, allow_inf_nan=False)
    """True classifier-free guidance; null: `digen.sampling.val_true_cfg_scale`."""
    seed: int | None = None
    """Equal seeds give equal pictures under equal weights; null: a new seed."""
    model: str | None = None
    """Accepted, because OpenAI's clients send it; a replica has one model."""
    response_format: Literal["b64_json"] = "b64_json"


@dataclass(frozen=True)
class Limits:
    """Upper bounds of one request."""

    size_px: int
    """Maximum of width and height."""
    num_steps: int
    num_images: int
    num_requests: int
    """Requests in flight at a time; 503 beyond that."""

    @classmethod
    def of(cls, digen: DigenConfig) -> Limits:
        """The limits of `digen.rollout.http`; null there means the value that the run samples with."""
        http, sampling = digen.rollout.http, digen.sampling
        return cls(
            size_px=max(sampling.height_px, sampling.width_px) if http.max_size_px is None else http.max_size_px,
            num_steps=sampling.val_num_steps if http.max_steps is None else http.max_steps,
            num_images=http.max_images,
            num_requests=http.max_requests,
        )

    def check(self, sampling: Sampling, num_images: int) -> None:
        """Raise HTTPException 400 for a request beyond a limit; names the limit's key."""
        geometry = sampling.geometry
        for what, value, limit, key in (
            ("size", max(geometry.width_px, geometry.height_px), self.size_px, "max_size_px"),
            ("num_inference_steps", sampling.num_steps, self.num_steps, "max_steps"),
            ("n", num_images, self.num_images, "max_images"),
        ):
            if value > limit:
                raise HTTPException(400, f"{what} must be <= {limit} (digen.rollout.http.{key}), got {value}")


class Door:
    """ASGI middleware: admits only requests with the right host name, key, content type and size.

    Args:
        key: bearer token that every request must carry; None requires none.
        host: the address served on. On loopback the Host header must name loopback too, so that a web page cannot reach
            the API through its own host name (DNS rebinding).
        max_body_bytes: maximum body size.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, host: str, max_body_bytes: int):
        self._app = app
        self._key_hash = None if key is None else _hash(key)
        self._asks_host = is_loopback(host)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket; there is no route for one
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["method"], headers)
        body = b""
        if refusal is None:
            try:
                body = await asyncio.wait_for(self._read(receive), BODY_TIMEOUT_S)
            except asyncio.TimeoutError:
                refusal = _error(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s")
            except _TooLarge:
                refusal = self._too_large()
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    def _refusal(self, method: str, headers: Headers) -> JSONResponse | None:
        """Error response for a request refused by its headers; None if it is admitted."""
        host = urlsplit(f"//{headers.get('host', '')}").hostname
        if self._asks_host and (host is None or not is_loopback(host)):
            return _error(421, "the Host header must name this machine's loopback address")
        if self._key_hash is not None:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not secrets.compare_digest(_hash(token.strip()), self._key_hash):
                return _error(401, "a valid bearer token is needed", {"WWW-Authenticate": "Bearer"})
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return _error(415, "the body must be application/json")
        length = headers.get("content-length", "0")
        return self._too_large() if length.isdecimal() and int(length) > self._max_body_bytes else None

    def _too_large(self) -> JSONResponse:
        return _error(413, f"the body must be <= {self._max_body_bytes} bytes (digen.rollout.http.max_body_bytes)")

    async def _read(self, receive: Receive) -> bytes:
        body, is_complete = b"", False
        while not is_complete:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                raise _TooLarge
            is_complete = not message.get("more_body", False)
        return body


class _TooLarge(Exception):
    """The body exceeds `max_body_bytes`."""


def build_app(draw: Draw, *, is_awake: Callable[[], bool], name: str, digen: DigenConfig, key: str | None) -> ASGIApp:
    """The app, behind its `Door`.

    Args:
        is_awake: False while the replica takes no requests.
        name: the model's name in `/v1/models`.
        key: value of the environment variable `digen.rollout.http.api_key_env`.
    """
    limits, http = Limits.of(digen), digen.rollout.http
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    num_in_flight = 0

    @app.get("/health")
    async def health() -> dict[str, str]:
        _require_awake(is_awake())
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "verl-digen"}]}

    @app.post("/v1/images/generations")
    async def generations(body: ImageRequest) -> dict[str, list[dict[str, str]]]:
        nonlocal num_in_flight
        requests = sample_requests(body, digen, limits)
        _require_awake(is_awake())
        if num_in_flight >= limits.num_requests:
            raise _unavailable(f"{num_in_flight} requests are in flight, as many as digen.rollout.http.max_requests")
        num_in_flight += 1
        try:
            pictures = await asyncio.gather(*(_draw_png(draw, request) for request in requests))
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        finally:
            num_in_flight -= 1
        return {"data": [{"b64_json": base64.b64encode(png).decode()} for png in pictures]}

    return Door(app, key=key, host=http.host, max_body_bytes=http.max_body_bytes)


def sample_requests(body: ImageRequest, digen: DigenConfig, limits: Limits) -> list[SampleRequest]:
    """The samples requested by a body: validation samples of one group.

    Raises:
        HTTPException: 400, a limit is exceeded.
    """
    config = digen.sampling
    width_px, height_px = map(int, body.size.split("x")) if body.size else (config.width_px, config.height_px)
    sampling = Sampling(
        geometry=Geometry(height_px, width_px),
        num_steps=config.val_num_steps if body.num_inference_steps is None else body.num_inference_steps,
        true_cfg_scale=config.val_true_cfg_scale if body.true_cfg_scale is None else body.true_cfg_scale,
        law=digen.sde.law,
        noise_level=digen.sde.noise_level,
        guidance_scale=config.guidance_scale,
        solver=config.val_solver,
    )
    limits.check(sampling, body.n)
    uid = f"http-{uuid.uuid4().hex if body.seed is None else body.seed}"
    negative_prompt = config.negative_prompt if body.negative_prompt is None else body.negative_prompt
    inputs, negative_inputs = PromptInputs(body.prompt), PromptInputs(negative_prompt)
    return [SampleRequest(uid, index, inputs, negative_inputs, ODE_ONLY, sampling) for index in range(body.n)]


async def _draw_png(draw: Draw, request: SampleRequest) -> bytes:
    pixels = await draw(request)
    return await asyncio.to_thread(_to_png, pixels)


def _to_png(pixels: Tensor) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, format="PNG")
    return file.getvalue()


def read_key(variable: str | None) -> str | None:
    """The API key from the environment variable `variable`; None if no variable is named.

    Raises:
        ValueError: the variable is not set in this process, or empty. No message contains the key.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise ValueError(
            f"digen.rollout.http.api_key_env must name an environment variable that holds the key, and {variable} is "
            "empty or not set here; export it where the run is started, and before `ray start` on every node"
        )
    return key


def _require_awake(is_awake: bool) -> None:
    if not is_awake:
        raise _unavailable("the replica sleeps or takes no requests at the moment")


def _unavailable(reason: str) -> HTTPException:
    return HTTPException(503, reason, headers={"Retry-After": str(RETRY_AFTER_S)})


def _error(status: int, reason: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": reason}, status, headers)


def _hash(text: str) -> bytes:
    """SHA-256; equal lengths make the comparison's time independent of the key's length."""
    return hashlib.sha256(text.encode()).digest()


def _replay(body: bytes, receive: Receive) -> Receive:
    """ASGI `receive` that returns the body that was already read."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
