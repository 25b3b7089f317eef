# SPDX-License-Identifier: Apache-2.0
"""A server of the OpenAI chat protocol in this process, and judges that ask it."""

import base64
import io
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from aiohttp import web
from PIL import Image

from tests.reward.servers.local import LocalServer
from verl_digen.config.reward import reward_entry
from verl_digen.reward.base import Reward
from verl_digen.reward.named import make

MODEL = "tiny-judge"

QUICK = {"backoff_s": 0.0, "max_retries": 2}
"""Settings of a client that does not wait."""


def message(text: str | None, reason: str = "stop", **further: Any) -> dict[str, Any]:
    """An answer with a text."""
    return {"message": {"role": "assistant", "content": text, **further}, "finish_reason": reason}


def likely(**probabilities: float) -> dict[str, Any]:
    """An answer of one token with these likeliest ones."""
    top = [{"token": text, "logprob": math.log(value)} for text, value in probabilities.items()]
    token = max(probabilities, key=probabilities.__getitem__)
    listed = [{"token": token, "logprob": math.log(probabilities[token]), "top_logprobs": top}]
    return {**message(token, "length"), "logprobs": {"content": listed}}


class ChatServer(LocalServer):
    """Answers each request with what `answer` makes of its JSON: a text, a choice, or (status, headers).

    Args:
        models: what it serves.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Any], models: tuple[str, ...] = (MODEL,)):
        super().__init__(self._reply)
        self._answer, self._models = answer, models

    @property
    def asked(self) -> list[dict[str, Any]]:
        """JSON of every request for an answer."""
        return [json.loads(body) for method, _, _, body in self.requests if method == "POST"]

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": name} for name in self._models]})
        assert request.path == "/v1/chat/completions", request.path
        made = self._answer(json.loads(self.requests[-1][3]))
        if isinstance(made, tuple):
            return web.Response(status=made[0], headers=made[1], text="error text")
        return web.json_response({"choices": [message(made) if isinstance(made, str) else made]})


def pictures_in(request: dict[str, Any]) -> list[np.ndarray]:
    """Pixels of the pictures of a request, in order."""
    parts = request["messages"][-1]["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    data = [base64.b64decode(url.partition(",")[2], validate=True) for url in urls]
    return [np.asarray(Image.open(io.BytesIO(content))) for content in data]


def question_in(request: dict[str, Any]) -> str:
    """The text of a request, which stands behind the pictures."""
    return request["messages"][-1]["content"][-1]["text"]


def judge_of(name: str, server: ChatServer | str, **settings: Any) -> Reward:
    """The reward `name`, asking `server`."""
    url = server if isinstance(server, str) else server.url
    entry = reward_entry(name, {"weight": 1.0, "url": url, **QUICK, **settings})
    return make(entry, torch.device("cpu"))
