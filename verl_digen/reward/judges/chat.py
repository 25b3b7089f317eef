# SPDX-License-Identifier: Apache-2.0
"""`ChatModel`: a vision-language model behind the OpenAI chat protocol, which is asked about pictures.

- It is asked at temperature 0, with a fixed seed.
- An answer that cannot be read (a refusal, another form, none) is asked for again, at most `max_asked_again` times;
  then the call fails with the answer's start in the message.
- What was read for a request is kept: the same question about the same pictures costs nothing.

Rewards ask through `verl_digen.reward.judges.base.Judge`, environments directly.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from verl_digen.require import require
from verl_digen.reward.base import RewardUnavailable
from verl_digen.reward.judges.content import Part
from verl_digen.reward.judges.reply import Reply, read_reply
from verl_digen.reward.judges.request import MODELS_PATH, OWN_FIELDS, PATH, chat_request, only_model
from verl_digen.reward.servers.answers import Answer, UnusableAnswer
from verl_digen.reward.servers.cache import content_key
from verl_digen.reward.servers.client import ServerClient
from verl_digen.reward.servers.settings import ServerSettings

REWARD_MODEL = "reward_model"
"""`url` of the servers that verl starts for `reward.reward_model` (`verl_digen/reward/reward_model.py`)."""
UNKNOWN_SERVER = "http://reward-model"
"""Address in place of `REWARD_MODEL` while its servers do not run."""

MAX_TOKENS = 1_000_000
MAX_SIDE_PX = 16_384
MAX_FRAMES = 1_000
MAX_ASKED_AGAIN = 100

T = TypeVar("T")


@dataclass(frozen=True)
class JudgeConfig(ServerSettings):
    """Settings of every judge."""

    url: Any = REWARD_MODEL
    """Server, or a list of servers of one model: http://host:8000, or with a path, which then stands before
    /chat/completions (https://api.openai.com/v1). reward_model: the servers of `reward.reward_model`, which verl
    starts."""
    max_concurrency: int = 16
    """Maximum requests in flight per URL, from each of the reward's processes."""
    model: str = ""
    """Name of the model; empty asks the server, which must serve one."""
    system: str = ""
    """Text of a system message; empty for none."""
    max_tokens: int = 1024
    """Maximum tokens of an answer, its thoughts included."""
    seed: int = 0
    """Seed of a request. At temperature 0 it matters to few servers."""
    max_px: int = 1024
    """Maximum of a picture's longer side in px; larger ones are made smaller before they are sent."""
    num_frames: int = 8
    """Maximum frames of a video that are sent, evenly spaced with the first and the last."""
    max_asked_again: int = 1
    """Maximum further requests after an answer that gives no score. `digen.reward.max_retries` comes on top."""
    request: dict[str, Any] = field(default_factory=dict)
    """Further fields of a request, e.g. {chat_template_kwargs: {enable_thinking: false}}."""

    def __post_init__(self) -> None:
        if self.url == REWARD_MODEL:
            replace(self, url=UNKNOWN_SERVER)  # checks the others
            return
        super().__post_init__()
        for name, least, most in (
            ("max_tokens", 1, MAX_TOKENS),
            ("max_px", 1, MAX_SIDE_PX),
            ("num_frames", 1, MAX_FRAMES),
            ("max_asked_again", 0, MAX_ASKED_AGAIN),
        ):
            value = getattr(self, name)
            require(least <= value <= most, f"{name} must lie in [{least}, {most}]", value, "leave it out")
        taken = sorted(OWN_FIELDS & set(self.request))
        require(
            not taken,
            "request must leave out the fields that a judge sets",
            taken,
            "model, max_tokens and seed are settings of their own; the temperature is always 0",
        )

    def server_settings(self) -> ServerSettings:
        """Settings of the client, with the full address of each server's API."""
        shared = {one.name: getattr(self, one.name) for one in fields(ServerSettings)}
        return ServerSettings(**{**shared, "url": [api_url(url) for url in self.urls]})


def api_url(url: str) -> str:
    """Address of the API that `PATH` is appended to; version 1 where the URL has no path."""
    return url if urlsplit(url).path.strip("/") else f"{url}/v1"


class ChatModel:
    """See the module.

    Args:
        name: what messages call the asker, e.g. `judge`.
        kind: what it is, before its name in messages about servers.

    Raises:
        ValueError: the address is that of verl's servers, and is not known.
    """

    def __init__(self, config: JudgeConfig, name: str, kind: str = "reward"):
        self.config, self._name = config, name
        if config.url == REWARD_MODEL:
            raise ValueError(
                f"{name}: url={REWARD_MODEL} needs the servers of a run with reward.reward_model.enable=true; "
                "set url=http://HOST:PORT of a server that runs"
            )
        self._client = ServerClient(config.server_settings(), f"{kind} {name}")
        self._model = config.model
        self._num_slots = config.max_concurrency * len(config.urls)
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        """Bound on the requests that are held in memory, of one event loop."""

    def take_counts(self) -> Mapping[str, int]:
        """Retries, openings of breakers and hits of the cache since the last time."""
        return self._client.take_counts()

    async def all(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """Results of calls at the same time, once every one has ended.

        Raises:
            Exception: the first that a call raised; first of all one that concerns the server and not a sample.
        """
        await self._know_model()
        results = await asyncio.gather(*calls, return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        for error in sorted(failed, key=lambda one: not isinstance(one, RewardUnavailable)):
            raise error
        return results  # type: ignore[return-value] - none of them is an exception

    async def ask(
        self,
        pictures: Sequence[Part],
        question: str,
        read: Callable[[Reply], T],
        *,
        top_logprobs: int = 0,
        unusable: Counter[str] | None = None,
    ) -> T:
        """Ask one question -> what `read` makes of the answer. To be called within `all`, which knows the model.

        Args:
            pictures: in the order in which the judge sees them.
            top_logprobs: tokens whose probability the answer gives at each place.
            unusable: counts answers that could not be read, under `asked_again`.

        Raises:
            UnusableAnswer: no answer gave a score. ServerError: the server did not answer.
        """
        config = self.config
        async with self._slot():
            request = chat_request(
                self._model,
                pictures,
                question,
                system=config.system,
                max_tokens=config.max_tokens,
                seed=config.seed,
                top_logprobs=top_logprobs,
                further=config.request,
            )
            return await self._answered(json.dumps(request).encode(), read, Counter() if unusable is None else unusable)

    async def _answered(self, body: bytes, read: Callable[[Reply], T], unusable: Counter[str]) -> T:
        """Ask until `read` can use an answer -> its result."""
        key, limit = content_key(body), 1 + self.config.max_asked_again
        known = self._client.cache.find(key)
        if known is not None:
            return read(known)
        num_asked, last = 0, UnusableAnswer()
        while num_asked < limit:
            answer = await self._client.post(PATH, body, content_type="application/json", read=_json)
            num_asked += 1
            try:
                reply = read_reply(answer)
                result = read(reply)
            except UnusableAnswer as error:
                last = error
                unusable["asked_again"] += 1
                continue
            self._client.cache.put(key, reply)
            return result
        raise UnusableAnswer(f"{self._name}: {last} (asked {num_asked} times)") from last

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._num_slots)
        return self._slots[1]

    async def _know_model(self) -> None:
        """Ask for the model's name, once."""
        if not self._model:
            self._model = only_model(await self._client.get(MODELS_PATH, read=_json))


def _json(answer: Answer) -> Any:
    """The JSON of an answer; ValueError if it is none, and the request is tried again."""
    try:
        return json.loads(answer.body)
    except ValueError as error:  # bad JSON, or bad UTF-8
        raise UnusableAnswer(f"the answer must be JSON ({error})") from error
