# SPDX-License-Identifier: Apache-2.0
"""The reward server's HTTP side: token, limits, `POST /score`, `GET /rewards`, `GET /health`.

| what comes | answer |
| --- | --- |
| no token, or another one | 401; /health needs none |
| a body that is too large | 413 |
| malformed JSON, or a reward that is not served | 400, with the place and the rule |
| more samples than may wait | 503 with Retry-After |
| a sample that cannot be scored | 200, and the reason in its `errors` |
"""

from __future__ import annotations

import asyncio
import hmac
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from verl_digen.score.rewards import LocalRewards, Scored
from verl_digen.score.unirl import Limits, ScoreRequest, ScoreRequests, answer_of, sample_of
from verl_digen.types import RewardInput

RETRY_AFTER_S = 1


@dataclass(frozen=True)
class ServerLimits:
    """Limits of what the server takes at once."""

    picture: Limits
    max_body_bytes: int
    """Size of one request's body."""
    max_samples: int
    """Samples in work or waiting, of all requests."""


class _Refused(Exception):
    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status = status


def make_app(rewards: LocalRewards, limits: ServerLimits, token: str | None) -> FastAPI:
    """The application.

    Args:
        token: what clients send as `Authorization: Bearer TOKEN`; None asks for none.
    """
    app = FastAPI(title="verl-digen rewards", docs_url=None, redoc_url=None, openapi_url=None)
    room = _Room(limits.max_samples)

    @app.exception_handler(_Refused)
    async def refuse(request: Request, refused: _Refused) -> JSONResponse:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": str(RETRY_AFTER_S)}}
        return JSONResponse({"detail": str(refused)}, refused.status, headers=headers.get(refused.status))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "rewards": {name: ["ready"] for name in rewards.names}, "num_samples": room.num_samples}

    @app.get("/rewards")
    async def list_rewards(request: Request) -> dict[str, Any]:
        _require_token(request, token)
        return {"rewards": list(rewards.names)}

    @app.post("/score")
    async def score(request: Request) -> JSONResponse:
        _require_token(request, token)
        body = await _body(request, limits.max_body_bytes)
        requests = _parsed(body, rewards.names)
        with room.taken(len(requests)):
            return JSONResponse(answer_of(requests, await _scored(requests, rewards, limits.picture)))

    return app


class _Room:
    """Samples in work, of all requests together."""

    def __init__(self, most: int):
        self._most, self.num_samples = most, 0

    def taken(self, number: int) -> _Place:
        if self.num_samples + number > self._most:
            raise _Refused(503, f"{self.num_samples} samples are in work, at most {self._most} may be; try again later")
        return _Place(self, number)


class _Place:
    def __init__(self, room: _Room, number: int):
        self._room, self._number = room, number

    def __enter__(self) -> None:
        self._room.num_samples += self._number

    def __exit__(self, *exception: object) -> None:
        self._room.num_samples -= self._number


def _require_token(request: Request, token: str | None) -> None:
    given = request.headers.get("authorization", "")
    if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise _Refused(401, "send the server's token as Authorization: Bearer TOKEN")


async def _body(request: Request, at_most: int) -> bytes:
    """The body, read no further than the limit."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > at_most:
            raise _Refused(413, f"a request must have at most {at_most} bytes; send fewer pictures at once")
        parts.append(part)
    return b"".join(parts)


def _parsed(body: bytes, served: Sequence[str]) -> list[ScoreRequest]:
    try:
        requests = ScoreRequests.model_validate_json(body).requests
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise _Refused(400, f"{place}: {first['msg']}") from error
    for number, request in enumerate(requests):
        for name in request.required_rewards:
            if name not in served:
                raise _Refused(
                    400, f"requests.{number}.required_rewards must be among {', '.join(served)}, got {name!r}"
                )
    return requests


async def _scored(requests: Sequence[ScoreRequest], rewards: LocalRewards, limits: Limits) -> list[Scored | str]:
    """Scores of each request, or why its picture cannot be read. Requests with equal rewards share calls."""
    with tempfile.TemporaryDirectory(prefix="digen_rewards_") as folder:
        samples = await asyncio.gather(
            *(
                asyncio.to_thread(_sample_or_reason, request, number, limits, Path(folder))
                for number, request in enumerate(requests)
            )
        )
        return list(
            await asyncio.gather(
                *(
                    _one(rewards, sample, request.required_rewards)
                    for request, sample in zip(requests, samples, strict=True)
                )
            )
        )


async def _one(rewards: LocalRewards, sample: RewardInput | str, names: Sequence[str]) -> Scored | str:
    if isinstance(sample, str):
        return sample
    (scored,) = await rewards.score([sample], list(dict.fromkeys(names)))
    return scored


def _sample_or_reason(request: ScoreRequest, index: int, limits: Limits, folder: Path) -> RewardInput | str:
    own = folder / str(index)
    own.mkdir()
    try:
        return sample_of(request, index, limits, own)
    except ValueError as error:
        return str(error)
