# SPDX-License-Identifier: Apache-2.0
"""A vision-language model that judges every picture and says what to change next, over the OpenAI chat protocol
(docs/environments.md).

An unusable answer never earns a 0; the detail `asked_again` counts an episode's. One client serves all episodes
of a process, so `max_concurrency` bounds them together.
"""

import json
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from PIL import Image

from verl_digen.environments.base import Environment, Instruction, Picture, TurnResult
from verl_digen.inputs.images import read_images
from verl_digen.require import In, refusing, require
from verl_digen.reward.base import frames_of
from verl_digen.reward.judges.chat import REWARD_MODEL, ChatModel, JudgeConfig, Part, picture_parts
from verl_digen.reward.judges.reading import Reply
from verl_digen.reward.servers.answers import UnusableAnswer, shown
from verl_digen.types import PromptRow

KEYS = {"score", "instruction"}
FENCE = "```"
MAX_INSTRUCTION_CHARS = 2000
"""Longest instruction that is accepted; the models' prompts are shorter."""

QUESTION = """\
You judge an image editor. The task is: {task}
The last instruction to the editor was: {instruction}
The last picture is its result; pictures before it, if any, are what it began with.
Give a score from 0 (instruction ignored, or the rest spoilt) to {max_score:g} (done perfectly, the rest kept), and the
instruction for the next edit, or null if nothing is left to do.
Answer with one JSON object and nothing else: {{"score": NUMBER, "instruction": "TEXT"}}"""
"""Text of `question` by default; ours."""


@dataclass(frozen=True)
class VlmJudgeConfig(JudgeConfig):
    url: Any = ""
    num_turns: Annotated[int, In("[1, inf]")] = 3
    """Turns of an episode at most; at most `digen.environment.max_turns`."""
    max_score: Annotated[float, In("(0, inf)")] = 10.0
    """Score of a perfect picture."""
    question: str = QUESTION
    """Text with {task} (the prompt), {instruction} (the turn's) and {max_score}; other braces are written twice."""

    questions = ()

    def __post_init__(self) -> None:
        require(self.url != REWARD_MODEL, "url must be the address of a server", self.url, "e.g. http://host:8000")
        super().__post_init__()
        rule = "question must be a text with only {task}, {instruction} and {max_score}"
        with refusing(rule, self.question, "write other braces twice"):
            self.asked("a task", "an instruction")

    def asked(self, task: str, instruction: str) -> str:
        """Question of one turn."""
        return self.question.format(task=task, instruction=instruction, max_score=self.max_score)


class VlmJudge(Environment):
    config_class = VlmJudgeConfig

    @classmethod
    def num_turns(cls, config: VlmJudgeConfig) -> int:
        return config.num_turns

    @classmethod
    def make_shared(cls, config: VlmJudgeConfig, device: torch.device) -> ChatModel:
        return ChatModel(config, "vlm_judge", "environment")

    def __init__(self, config: VlmJudgeConfig, shared: ChatModel):
        super().__init__(config, shared)
        self._chat = shared
        self._task = self._asked = ""
        self._sources: list[Part] = []
        self._num_turns = 0
        self._unusable: Counter[str] = Counter()

    async def reset(self, row: PromptRow, seed: int) -> Instruction:
        self._task = self._asked = row.text
        self._sources = await picture_parts(read_images(row.images), self.config.max_px)
        return Instruction(row.text)

    async def step(self, picture: Picture) -> TurnResult:
        """Ask for a score and the next instruction. UnusableAnswer if none can be read, ServerError without an
        answer."""
        config = self.config
        frames = [Image.fromarray(frame) for frame in frames_of(picture, config.num_frames)]
        parts = await picture_parts(frames, config.max_px)
        question = config.asked(self._task, self._asked)
        call = self._chat.ask(
            [*self._sources, *parts],
            question,
            partial(read_verdict, max_score=config.max_score),
            unusable=self._unusable,
        )
        ((score, instruction),) = await self._chat.all([call])
        self._num_turns += 1
        left = config.num_turns - self._num_turns
        details = {"asked_again": float(self._unusable["asked_again"]), "turns": float(self._num_turns)}
        if left == 0 or instruction is None:
            return TurnResult(score * (1 + left) / config.num_turns, True, details=details)
        self._asked = instruction
        return TurnResult(score / config.num_turns, False, Instruction(instruction), details)


def read_verdict(reply: Reply, max_score: float) -> tuple[float, str | None]:
    """(score from 0 to 1, instruction) of an answer, a JSON object; a fence of Markdown around it is left out.
    UnusableAnswer for anything else than the two keys with values of their kind."""
    text = reply.text
    if text.startswith(FENCE) and text.endswith(FENCE) and "\n" in text:
        text = text.partition("\n")[2].removesuffix(FENCE)
    try:
        found = json.loads(text)
    except ValueError as error:
        cut = "; it ended at max_tokens: raise max_tokens" if reply.is_cut else ""
        raise UnusableAnswer(f"the judge's answer must be JSON ({error}), got {shown(reply.text)}{cut}") from error
    if not isinstance(found, dict) or set(found) != KEYS:
        raise UnusableAnswer(f'the judge must answer with "score" and "instruction" alone, got {shown(reply.text)}')
    score, instruction = found["score"], found["instruction"]
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= max_score:
        raise UnusableAnswer(f"the judge's score must be a number in [0, {max_score:g}], got {shown(score)}")
    if instruction is not None and not (isinstance(instruction, str) and instruction.strip()):
        raise UnusableAnswer(f"the judge's instruction must be a text or null, got {shown(instruction)}")
    if instruction is not None and len(instruction) > MAX_INSTRUCTION_CHARS:
        raise UnusableAnswer(
            f"the judge's instruction must have at most {MAX_INSTRUCTION_CHARS} characters, got {shown(instruction)}"
        )
    return float(score) / max_score, None if instruction is None else instruction.strip()


ENVIRONMENT = VlmJudge
