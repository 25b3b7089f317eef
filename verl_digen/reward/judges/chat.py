# SPDX-License-Identifier: Apache-2.0
"""`ChatModel`: a vision-language model behind the OpenAI chat protocol, which is asked about pictures. Rewards ask
through `Judge`, environments directly.

A sample without a usable answer fails; it never gets a 0.
"""

import asyncio
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from string import Formatter
from typing import Annotated, Any, ClassVar, TypeVar, cast
from urllib.parse import urlsplit

import torch
from PIL import Image

from verl_digen.require import In, refusing, require
from verl_digen.reward.base import Result, Reward, base64_of, images_of
from verl_digen.reward.judges.reading import Reply, read_reply
from verl_digen.reward.servers.answers import HttpRequest, UnusableAnswer, json_of
from verl_digen.reward.servers.client import ServerClient, ServerSettings
from verl_digen.types import PromptRow, RewardInput

Part = dict[str, Any]
"""One part of a message's content."""


def fitted(image: Image.Image, max_px: int) -> Image.Image:
    """The picture, made smaller where its longer side has more than `max_px`; its shape stays."""
    longer = max(image.size)
    if longer <= max_px:
        return image
    width, height = (max(1, round(side * max_px / longer)) for side in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)


async def picture_parts(images: Sequence[Image.Image], max_px: int) -> list[Part]:
    """Parts of several pictures, `fitted` and encoded in a thread: a PNG of a megapixel takes a quarter of a second."""
    encoded = await asyncio.to_thread(lambda: [base64_of(fitted(image, max_px)) for image in images])
    return [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}} for picture in encoded]


def fields_of(question: str, key: str) -> tuple[str, ...]:
    """Names in braces, in order; `key` is what the user typed the question under. ValueError for a brace without its
    counterpart, or with anything but a name in it."""
    remedy = 'write {prompt}, {ground_truth} or {a column of the row}, and any other brace twice, e.g. {{"score": 4}}'
    with refusing(f"{key} must be a text with names in braces", question, remedy):
        parts = [part[1:] for part in Formatter().parse(question) if part[1] is not None]
    for name, spec, conversion in parts:
        is_name = str(name).isidentifier() and not spec and not conversion
        require(is_name, f"{key} must have nothing but names in braces", name, remedy)
    return tuple(str(name) for name, _, _ in parts)


def filled(question: str, row: PromptRow, key: str) -> str:
    """The question about one prompt. ValueError if the row lacks a column that it names.

    Example:
        filled("Does it show {prompt}?", PromptRow("a cat", "test", None), "judge.question")  # 'Does it show a cat?'
    """
    values: dict[str, Any] = {**row.extra, "prompt": row.text, "ground_truth": row.ground_truth}
    for name in fields_of(question, key):
        require(
            name in values and values[name] is not None,
            f"{key} must name columns that every prompt has ({', '.join(sorted(map(str, values)))})",
            name,
            f"add it to the row{f' ({row.place})' if row.place else ''}, or take it out of the question",
        )
    return question.format_map(values)


REWARD_MODEL = "reward_model"
"""`url` of the servers that verl starts for `reward.reward_model` (`verl_digen/reward/reward_model.py`)."""

PATH = "/chat/completions"
"""Path below the address of an API, which ends with its version."""
MODELS_PATH = "/models"

MAX_TOP_LOGPROBS = 20
"""The protocol's limit, and vLLM's default of `--max-logprobs`."""

OWN_FIELDS = frozenset(
    ("model", "messages", "temperature", "max_tokens", "seed", "logprobs", "top_logprobs", "n", "stream")
)
"""Fields that a judge sets itself, or relies on being left out."""

MAX_SIDE_PX = 16_384

T = TypeVar("T")


@dataclass(frozen=True)
class JudgeConfig(ServerSettings):
    """Settings of every judge."""

    url: Any = REWARD_MODEL
    """Server, or a list of servers of one model: http://host:8000, or with a path, which then stands before
    /chat/completions (https://api.openai.com/v1). reward_model: the servers of `reward.reward_model`, which verl
    starts."""
    max_concurrency: Annotated[int, In("[1, 10000]")] = 16
    """Maximum requests in flight per URL, from each of the reward's processes."""
    model: str = ""
    """Name of the model; empty asks the server, which must serve one."""
    system: str = ""
    """Text of a system message; empty for none."""
    max_tokens: Annotated[int, In("[1, 1000000]")] = 1024
    """Maximum tokens of an answer, its thoughts included."""
    seed: int = 0
    """Seed of a request. At temperature 0 it matters to few servers."""
    question: str = ""
    """Text with {prompt}, {ground_truth} and {NAME} of further columns; other braces are written twice."""
    max_px: Annotated[int, In(f"[1, {MAX_SIDE_PX}]")] = 1024
    """Maximum of a picture's longer side in px; larger ones are made smaller before they are sent."""
    num_frames: Annotated[int, In("[1, 1000]")] = 8
    """Maximum frames of a video that are sent, evenly spaced with the first and the last."""
    max_asked_again: Annotated[int, In("[0, 100]")] = 1
    """Maximum further requests after an answer that gives no score. `digen.reward.max_retries` comes on top."""
    request: dict[str, Any] = field(default_factory=dict)
    """Further fields of a request, e.g. {chat_template_kwargs: {enable_thinking: false}}."""

    questions: ClassVar[tuple[str, ...]] = ("question",)
    """Settings that are a text with columns of the prompt in braces."""

    def __post_init__(self) -> None:
        if self.url != REWARD_MODEL:
            super().__post_init__()
        taken = sorted(OWN_FIELDS & set(self.request))
        require(
            not taken,
            "request must leave out the fields that a judge sets",
            taken,
            "model, max_tokens and seed are settings of their own; the temperature is always 0",
        )
        for name in self.questions:
            fields_of(vars(self)[name], name)


def api_url(url: str) -> str:
    """Address of the API that `PATH` is appended to; version 1 where the URL has no path."""
    return url if urlsplit(url).path.strip("/") else f"{url}/v1"


def chat_request(
    config: JudgeConfig, model: str, pictures: Sequence[Part], question: str, top_logprobs: int = 0
) -> dict[str, Any]:
    """JSON of a request at temperature 0: one user message of pictures, then the question. Fields and limits:
    https://platform.openai.com/docs/api-reference/chat/create; vLLM and SGLang take the same."""
    system = [{"role": "system", "content": config.system}] if config.system else []
    return {
        "model": model,
        "messages": [*system, {"role": "user", "content": [*pictures, {"type": "text", "text": question}]}],
        "temperature": 0.0,
        "max_tokens": config.max_tokens,
        "seed": config.seed,
        **config.request,
        **({"logprobs": True, "top_logprobs": top_logprobs} if top_logprobs else {}),
    }


def only_model(body: Any) -> str:
    """The model of a server that serves one, from its answer to GET /v1/models; adapters (with a parent) do not count.
    ValueError if it serves none or several, or the answer is another one."""
    listed = body.get("data") if isinstance(body, Mapping) else None
    if not isinstance(listed, list) or not all(isinstance(model, Mapping) and "id" in model for model in listed):
        raise ValueError(f"{MODELS_PATH} must list the models of a server, got {str(body)[:200]!r}; set model=NAME")
    names = [str(model["id"]) for model in listed if not model.get("parent")]
    if len(names) != 1:
        raise ValueError(
            f"a server that is asked without a model must serve one, got {', '.join(names) or 'none'}; set model=NAME"
        )
    return names[0]


class ChatModel:
    """A served model, asked at temperature 0. Messages call the asker `name`, those about servers "`kind` `name`".
    ValueError if the address of verl's servers is not known."""

    def __init__(self, config: JudgeConfig, name: str, kind: str = "reward"):
        self.config, self._name = config, name
        if config.url == REWARD_MODEL:
            raise ValueError(
                f"{name}: url={REWARD_MODEL} needs the servers of a run with reward.reward_model.enable=true; "
                "set url=http://HOST:PORT of a server that runs"
            )
        self.client = ServerClient(config, f"{kind} {name}", [api_url(url) for url in config.urls])
        self._model = config.model

    async def all(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """Results of calls at the same time, once every one has ended; raises the first error."""
        results = await self.outcomes(calls)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value] - none of them is an exception

    async def outcomes(self, calls: Iterable[Awaitable[T]]) -> list[T | BaseException]:
        """Results or errors of calls at the same time."""
        if not self._model:
            self._model = only_model(await self.client.send(HttpRequest(MODELS_PATH, None), json_of))
        return await asyncio.gather(*calls, return_exceptions=True)

    async def ask(
        self,
        pictures: Sequence[Part],
        question: str,
        read: Callable[[Reply], T],
        *,
        top_logprobs: int = 0,
        unusable: Counter[str] | None = None,
    ) -> T:
        """Ask one question -> what `read` makes of the answer. `all` and `outcomes` know the model.

        An answer that cannot be read (a refusal, another form, none) is asked for again, at most `max_asked_again`
        times, and counted in `unusable` under `asked_again`. `pictures` are in the order in which the judge sees them;
        `top_logprobs` is the number of tokens whose probability the answer gives at each place. UnusableAnswer if no
        answer gave a score, ServerError if the server did not answer.
        """
        limit = 1 + self.config.max_asked_again
        asked = chat_request(self.config, self._model, pictures, question, top_logprobs)
        request = HttpRequest(PATH, json.dumps(asked).encode(), "application/json")
        last = UnusableAnswer()
        for _ in range(limit):
            answer = await self.client.send(request, json_of)
            try:
                return read(read_reply(answer))
            except UnusableAnswer as error:
                last = error
                if unusable is not None:
                    unusable["asked_again"] += 1
        raise UnusableAnswer(f"{self._name}: {last} (asked {limit} times)") from last


class Judge(Reward):
    """A reward of a `ChatModel`; a subclass says what is asked and how it is read."""

    name: ClassVar[str]
    """Name for messages."""
    config_class: ClassVar[type] = JudgeConfig

    @classmethod
    def check_row(cls, arguments: Mapping[str, Any], row: PromptRow) -> None:
        """ValueError if the row lacks a column that a question names."""
        defaults = {one.name: one.default for one in fields(cls.config_class)}
        for key in cls.config_class.questions:
            filled(str(arguments.get(key, defaults[key])), row, f"{cls.name}: {key}")

    def __init__(self, config: JudgeConfig, device: torch.device):
        super().__init__(config, device)
        self.chat = ChatModel(config, self.name)

    def take_counts(self) -> Mapping[str, int]:
        return self.chat.client.take_counts()

    def question(self, row: PromptRow, key: str = "question") -> str:
        """The question of a setting about one prompt. ValueError if the row lacks a column that it names."""
        return filled(vars(self.config)[key], row, f"{self.name}: {key}")

    async def frames(self, sample: RewardInput) -> list[Part]:
        """The sample's frames, at most `num_frames`."""
        return await picture_parts(images_of(sample, self.config.num_frames), self.config.max_px)

    async def sources(self, sample: RewardInput) -> list[Part]:
        """The pictures that its prompt is about."""
        return await picture_parts(sample.sources(), self.config.max_px)


class SampleJudge(Judge):
    """A judge of single samples."""

    async def score(self, batch: Sequence[RewardInput]) -> Sequence[Result | Exception]:
        """Score samples at the same time."""
        found = await self.chat.outcomes(self.judge(sample) for sample in batch)
        return [one if isinstance(one, Exception) else cast(Result, one) for one in found]

    @abstractmethod
    async def judge(self, sample: RewardInput) -> Result:
        """Score one sample."""
